"""Data parallel training in JAX: each batch is cut over a mesh of devices, here four that the processor plays.

Run it as `python jax_mesh.py s3://bucket/digits/train/`: shards of `NAME.png` (8 x 8, grey) and `NAME.cls`, as
`digits.py` writes them. Needs: penstock's extra `image`, jax
"""

import os
import sys
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # read when jax is imported

import jax  # type: ignore[import-not-found]  # mypy's environment has no JAX
import jax.numpy as jnp  # type: ignore[import-not-found]
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # type: ignore[import-not-found]

import penstock as ps

RATE = 0.5


def loss_of(weights: Any, images: Any, labels: Any) -> Any:
    """Softmax regression: images uint8[B, 8, 8], labels int64[B]."""
    scores = images.reshape(len(images), -1) / 255 @ weights
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1))


@jax.jit  # type: ignore[untyped-decorator]
def step(weights: Any, images: Any, labels: Any) -> Any:
    loss, gradient = jax.value_and_grad(loss_of)(weights, images, labels)
    return weights - RATE * gradient, loss


def main() -> None:
    mesh = Mesh(jax.devices(), ("data",))
    cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    pipeline = (
        ps.shards(sys.argv[1])
        .shuffle(window=1024, seed=0)
        .decode(ps.Image("png", mode="L"), ps.Integer("cls"))
        .batch(64, drop_last=True)  # a multiple of the devices
    )
    weights = jax.device_put(jnp.zeros((64, 10)), whole)
    with ps.Loader(pipeline, rank=jax.process_index(), world_size=jax.process_count()) as loader:
        for epoch in loader.epochs(3):
            for batch in loader:  # {"png": uint8[64, 8, 8], "cls": int64[64], ...}
                images, labels = jax.device_put((batch["png"], batch["cls"]), cut)
                weights, loss = step(weights, images, labels)
            print(f"epoch {epoch} loss {float(loss):.3f} on {len(images.sharding.device_set)} devices")


if __name__ == "__main__":
    main()
