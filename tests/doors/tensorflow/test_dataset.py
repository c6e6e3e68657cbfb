from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import penstock as ps
from loading import numbers, pipeline, shard, write_counted
from penstock.errors import ConfigError
from servers.leaks import threads


def test_batches_are_the_loaders(folder: Path) -> None:
    """Numbers, texts and keys are the Loader's, in its order, epoch after epoch."""
    dataset = ps.tensorflow.dataset(pipeline(folder))
    with ps.Loader(pipeline(folder)) as loader:
        for _ in range(3):
            for ours, theirs in zip(loader, dataset, strict=True):
                assert theirs["cls"].numpy().tolist() == ours["cls"].tolist()
                assert [text.decode() for text in theirs["txt"].numpy()] == ours["txt"]
                assert [key.decode() for key in theirs["__key__"].numpy()] == ours["__key__"]
                assert theirs["__position__"].numpy().tolist() == ours["__position__"].tolist()


def test_the_element_spec_is_known_before_iterating(folder: Path) -> None:
    """Dtypes and shapes are the first batch's, the batch size is open, and nothing of that batch is lost."""
    dataset = ps.tensorflow.dataset(pipeline(folder))
    assert dataset.element_spec["cls"] == tf.TensorSpec((None,), tf.int64)
    assert dataset.element_spec["txt"] == tf.TensorSpec((None,), tf.string)
    assert sorted(numbers(dataset)) == list(range(20))


def test_a_signature_saves_the_look(folder: Path) -> None:
    """With signature= nothing is read before iterating, and only its columns come through."""
    before = threads()
    dataset = ps.tensorflow.dataset(pipeline(folder), signature={"cls": tf.TensorSpec((None,), tf.int64)})
    assert threads() <= before
    assert [list(batch) for batch in dataset.take(1)] == [["cls"]]


def test_an_iteration_is_a_whole_epoch(folder: Path) -> None:
    """After one that was left early, the next iteration is the next epoch from its start."""
    with ps.Loader(pipeline(folder, batch=4)) as loader:
        epochs = [numbers(loader) for _ in range(3)]
    dataset = ps.tensorflow.dataset(pipeline(folder, batch=4))
    assert numbers(dataset.take(2)) == epochs[0][:8]
    assert numbers(dataset) == epochs[1]
    assert numbers(dataset) == epochs[2]


def test_a_loader_of_your_own(folder: Path) -> None:
    """Given a Loader, it stays the caller's: its statistics count, its state says where the dataset is."""
    with ps.Loader(pipeline(folder), threads=1) as loader:
        dataset = ps.tensorflow.dataset(loader)
        assert sorted(numbers(dataset)) == list(range(20))
        assert loader.statistics().samples == 20
        assert loader.state_dict()["epoch"] == 1
        with pytest.raises(ConfigError, match="threads"):
            ps.tensorflow.dataset(loader, threads=2)


@pytest.mark.parametrize("count", [2, 3])
def test_a_state_may_be_loaded_before_or_after_the_dataset_is_made(folder: Path, count: int) -> None:
    """The first iteration goes on there, inside an epoch or at its end, and the next one is a whole epoch."""
    with ps.Loader(pipeline(folder)) as loader:
        epochs = [numbers(loader) for _ in range(3)]
        loader.restart(0)
        batches = iter(loader)
        state = [loader.state_dict() for _, _ in zip(range(count), batches, strict=False)][-1]
    rest = epochs[0][8 * count :] or epochs[1]
    with ps.Loader(pipeline(folder)) as loader:
        loader.load_state_dict(state)
        assert numbers(ps.tensorflow.dataset(loader)) == rest
    with ps.Loader(pipeline(folder)) as loader:
        dataset = ps.tensorflow.dataset(loader)
        loader.load_state_dict(state)
        assert numbers(dataset) == rest
        assert numbers(dataset) == epochs[1 if count == 2 else 2]


def test_pictures_arrive_as_they_are(tmp_path: Path) -> None:
    """uint8[B, H, W, 3] of a map function reaches TensorFlow bit by bit."""

    def picture(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.full((4, 5, 3), int(sample["cls"]), np.uint8), "cls": sample["cls"]}

    write_counted(tmp_path, (6,))
    made = ps.shards(f"{tmp_path}/").decode(ps.Integer("cls")).map(picture).batch(4)
    dataset = ps.tensorflow.dataset(made)
    assert dataset.element_spec["image"] == tf.TensorSpec((None, 4, 5, 3), tf.uint8)
    for batch in dataset:
        assert batch["image"].shape[1:] == (4, 5, 3)
        assert (batch["image"].numpy()[:, 0, 0, 0] == batch["cls"].numpy()).all()


def _tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.arange(sample["cls"], dtype=np.int32), "cls": sample["cls"]}


def test_ragged_columns_are_ragged_tensors(folder: Path) -> None:
    """Arrays of unequal lengths arrive as tf.RaggedTensor, row by row what they were."""
    made = ps.shards(f"{folder}/").decode(ps.Integer("cls")).map(_tokens).batch(8, ragged=["tokens"])
    for batch in ps.tensorflow.dataset(made):
        assert [len(row) for row in batch["tokens"].to_list()] == batch["cls"].numpy().tolist()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras's word for an epoch of unknown length
def test_in_a_keras_fit(folder: Path) -> None:
    """model.fit takes it, epoch after epoch."""
    dataset = ps.tensorflow.dataset(pipeline(folder))
    pairs = dataset.map(lambda batch: (tf.cast(batch["cls"], tf.float32)[:, None] / 20, batch["cls"]))
    model = tf.keras.Sequential([tf.keras.layers.Dense(20)])
    model.compile(optimizer="sgd", loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(pairs, epochs=2, verbose=0, shuffle=False)
    assert len(history.history["loss"]) == 2


def test_a_distributed_strategy_says_the_rank(folder: Path) -> None:
    """The input context of tf.distribute gives rank and world size."""
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])

    def per_worker(context: Any) -> tf.data.Dataset:
        return ps.tensorflow.dataset(
            pipeline(folder), rank=context.input_pipeline_id, world_size=context.num_input_pipelines
        )

    batches = strategy.distribute_datasets_from_function(per_worker)
    assert sorted(numbers(batches)) == list(range(20))


def test_what_no_tensor_holds_is_refused(tmp_path: Path) -> None:
    """JSON objects are an error that names the column, when the dataset is made."""
    (tmp_path / "a.tar").write_bytes(shard([{"__key__": "0", "json": '{"a": 1}'}]))
    with pytest.raises(ConfigError, match=r"'json' holds dict"):
        ps.tensorflow.dataset(ps.shards(f"{tmp_path}/").decode(ps.Json("json")).batch(1))


def test_errors_keep_their_words(tmp_path: Path) -> None:
    """What goes wrong below is raised by TensorFlow with the message of the error, the shard's name included."""
    write_counted(tmp_path, (6,))
    (tmp_path / "s-001.tar").write_bytes(b"no tar at all" * 100)
    dataset = ps.tensorflow.dataset(pipeline(tmp_path, window=None, batch=3))
    with pytest.raises(tf.errors.OpError, match=r"s-001\.tar"):
        list(dataset)
