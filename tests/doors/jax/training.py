"""A small training with JAX on one process or several, which goes on from its newest checkpoint.

``python training.py DATA RUN STEP RANK RANKS PORT`` saves every second step below ``RUN``, is killed behind ``STEP``, and
appends a line of JSON for each step to ``RUN.RANK.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock as ps

data, run, kill_step, rank, ranks_count, port = [*sys.argv[1:3], *map(int, sys.argv[3:])]
if ranks_count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=ranks_count, process_id=rank)
mesh = Mesh(jax.devices(), ("data",))
cut, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())


def loss_of(weights: Any, numbers: Any, key: Any) -> Any:
    """A loss that depends on the samples, the weights and the random generator."""
    hidden = jnp.tanh(numbers[:, None] / 50 * weights["hidden"]) * jax.random.bernoulli(key, 0.5, (len(numbers), 8))
    return jnp.mean((hidden @ weights["out"] - numbers / 25) ** 2)


@jax.jit
def train_step(weights: Any, numbers: Any, step: Any) -> tuple[Any, Any]:
    """One step of gradient descent."""
    key = jax.random.fold_in(jax.random.key(7), step)
    loss, gradients = jax.value_and_grad(loss_of)(weights, numbers, key)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, weights, gradients), loss


pipeline = ps.shards(data).shuffle(window=16, seed=3).decode(ps.Integer("cls")).batch(8 // ranks_count, drop_last=True)
weights = jax.device_put({"hidden": jnp.linspace(-1.0, 1.0, 8), "out": jnp.ones(8)}, whole)
step = 0
with (
    ps.Loader(pipeline, rank=jax.process_index(), world_size=jax.process_count()) as loader,
    ocp.CheckpointManager(run) as manager,
    open(f"{run}.{rank}.jsonl", "a") as log,
):
    if manager.latest_step() is not None:
        step = manager.latest_step()
        parts = ocp.args.Composite(weights=ocp.args.StandardRestore(weights), loader=ocp.args.JsonRestore())
        restored = manager.restore(step, args=parts)
        weights = restored["weights"]
        loader.load_state_dict(restored["loader"])
    for epoch in loader.epochs(3):
        for batch in loader:
            numbers = jax.make_array_from_process_local_data(cut, batch["cls"].astype("float32"))
            weights, loss = train_step(weights, numbers, step)
            step += 1
            log.write(json.dumps([step, epoch, batch["__key__"], float(loss)]) + "\n")
            log.flush()
            if step % 2 == 0:
                parts = ocp.args.Composite(
                    weights=ocp.args.StandardSave(weights), loader=ocp.args.JsonSave(loader.state_dict())
                )
                manager.save(step, args=parts)
            if step == kill_step:
                manager.wait_until_finished()
                Path(f"{run}.{rank}.{step}").touch()
                while rank == 0 and not all(Path(f"{run}.{other}.{step}").exists() for other in range(ranks_count)):
                    time.sleep(0.01)  # the others cannot finish their saving once this one, which coordinates, is dead
                os.kill(os.getpid(), signal.SIGKILL)
