"""The table of doors: where each is, and what it has. A reason takes the place of what a door does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reason:
    """Why a door does not have something.

    Attributes:
        text: A sentence for the page.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One door.

    Attributes:
        name: How users know it, in Markdown.
        door: Its class, ``MODULE:CLASS`` below ``doors.matrix``. The doors of a module share a process.
        form: Shards that it is given.
        workers: Number of workers that are tried, or why it has none.
        order_with_workers: Order of the samples of several workers. Without workers, it is always that of the shards.
        shuffle: Whose shuffle it has, or why it has none. That of a ``ps.Loader`` depends on the seed alone.
        resumes: Whether it continues in the middle of an epoch, or why it does not.
        caches: Whether it reads from a cache on this node's disk, or why it does not.
        errors: Classes of its errors, where timing decides which of them is raised.
        cut_off: Why the error for a shard that was cut off does not name the shard, if it does not.
        faults_as: Name of the row that is tried with faults in the place of this one, if it is slow and reads by the same door.
        needs: What must be there besides Python packages.
    """

    name: str
    door: str
    form: Literal["tar", "tfrecord"] = "tar"
    workers: int | Reason
    order_with_workers: Literal["the shards'", "its own"] = "the shards'"
    shuffle: Literal["the Loader's", "its own"] | Reason
    resumes: Literal[True] | Reason
    caches: Literal[True] | Reason
    errors: tuple[str, ...] = ()
    cut_off: Reason | None = None
    faults_as: str | None = None
    needs: Literal["fuse"] | None = None

    @property
    def module(self) -> str:
        """Module of the door."""
        return self.door.partition(":")[0]


_BYTES = Reason("The door gives files or streams; only the program that reads them can shuffle.")
_ONE_PROCESS = Reason("One process reads.")
_FILES = Reason("The door gives files. Reading on from any byte is cheap, but the program has to remember which one.")
_STREAM = Reason("A stream always starts at the beginning.")
_JOINED = Reason(
    "All objects form one stream. Their bytes arrive as they are stored, and the parser notices the cut; it names the stream, "
    "and penstock's parser also the sample."
)
_SAMPLER = Reason("Samples are read by number, so the position is the state of the sampler that draws the numbers.")

ROWS = (
    Row(
        name="`ps.Loader` (workers: `processes=`)", door="plain_doors:LoaderDoor", workers=2, shuffle="the Loader's",
        resumes=True, caches=True,
    ),
    Row(
        name="`pipeline.open()`", door="plain_doors:RandomAccessDoor", workers=_ONE_PROCESS,
        shuffle=Reason("Samples are read by number."), resumes=_SAMPLER, caches=True,
    ),
    Row(
        name="`penstock cat` and Python's `tarfile`", door="plain_doors:CatDoor", workers=_ONE_PROCESS, shuffle=_BYTES,
        resumes=_STREAM, caches=Reason("The command has no option for a cache."), cut_off=_JOINED,
    ),
    Row(
        name="`ps.mount` and Python's `tarfile`", door="plain_doors:MountDoor", workers=_ONE_PROCESS, shuffle=_BYTES,
        resumes=_FILES, caches=True, needs="fuse",
    ),
    Row(
        name="`penstock gateway` and boto3", door="plain_doors:GatewayDoor", workers=_ONE_PROCESS, shuffle=_BYTES,
        resumes=_FILES, caches=True,
    ),
    Row(
        name="`fsspec.filesystem(\"penstock\")` and Python's `tarfile`", door="plain_doors:FsspecDoor", workers=_ONE_PROCESS,
        shuffle=_BYTES, resumes=_FILES, caches=True,
    ),
    Row(
        name="`penstock run`, File mode", door="plain_doors:RunDoor", workers=_ONE_PROCESS, shuffle=_BYTES, resumes=_FILES,
        caches=True,
    ),
    Row(
        name="`penstock run`, Pipe mode, `PipeReader`", door="plain_doors:RunPipeDoor",
        workers=Reason("One process reads a pipe; `copies=` and `split=` make more pipes."), shuffle="its own", resumes=True,
        caches=Reason("A pipe keeps nothing on the disk."), cut_off=_JOINED,
    ),
    Row(
        name="`penstock run`, Fast File mode", door="plain_doors:RunFastFileDoor", workers=_ONE_PROCESS, shuffle=_BYTES,
        resumes=_FILES, caches=Reason("The command has no option for a cache; `ps.mount` has one."), needs="fuse",
    ),
    Row(
        name="`ps.torch.IterableDataset`, `StatefulDataLoader`", door="torch_doors:IterableDoor", workers=4,
        shuffle="the Loader's", resumes=True, caches=True,
    ),
    Row(
        name="`ps.torch.MapDataset`, `DataLoader`", door="torch_doors:MapDoor", workers=4, shuffle="its own", resumes=_SAMPLER,
        caches=True,
    ),
    Row(
        name="`webdataset.WebDataset` on `s3://`", door="torch_doors:WebDatasetDoor", workers=4, order_with_workers="its own",
        shuffle="its own", resumes=Reason("WebDataset has no state."), caches=True,
    ),
    Row(
        name="`webdataset.WebDataset` on `pipe:penstock cat`", door="torch_doors:WebDatasetPipeDoor", workers=4,
        order_with_workers="its own", shuffle="its own", resumes=Reason("WebDataset has no state."),
        errors=("ReadError", "OSError"), caches=Reason("The command has no option for a cache."),
    ),
    Row(
        name="`S3IterableDataset` of the connector's API", door="torch_doors:ConnectorIterableDoor", workers=4,
        shuffle=Reason("The connector's API does not shuffle when it iterates."),
        resumes=Reason("The connector's API has no state."), caches=Reason("The connector's API has no cache."),
    ),
    Row(
        name="`S3MapDataset` of the connector's API", door="torch_doors:ConnectorMapDoor", workers=4, shuffle="its own",
        resumes=_SAMPLER, caches=Reason("The connector's API has no cache."),
    ),
    Row(
        name="`ps.huggingface.dataset`, `StatefulDataLoader`", door="torch_doors:HuggingFaceDoor", workers=2,
        shuffle="the Loader's", resumes=True, caches=True,
    ),
    Row(
        name="Lightning's `Trainer` on `ps.torch.Tensors`", door="lightning_doors:LightningDoor", workers=2,
        shuffle="the Loader's", resumes=True, caches=True,
    ),
    Row(
        name="JAX: `device_put` of a `ps.Loader`'s batches", door="jax_doors:JaxDoor", workers=2, shuffle="the Loader's",
        resumes=True, caches=True,
    ),
    Row(
        name="`ps.tensorflow.dataset`", door="tensorflow_doors:DatasetDoor", workers=2, shuffle="the Loader's", resumes=True,
        caches=True,
    ),
    Row(
        name="`tf.data.TFRecordDataset` on `ps.mount`", door="tensorflow_doors:TFRecordMountDoor", form="tfrecord",
        workers=Reason("`tf.data` uses threads."), shuffle="its own",
        resumes=Reason("The position is in TensorFlow's own checkpoints."), caches=True,
        cut_off=Reason("TensorFlow's error names the position in the file, but not the file."), needs="fuse",
    ),
    Row(
        name="`tf.data.Dataset.from_generator` on `PipeReader`", door="tensorflow_doors:TFRecordPipeDoor", form="tfrecord",
        workers=Reason("One process reads a pipe; `copies=` and `split=` make more pipes."), shuffle="its own",
        resumes=Reason("TensorFlow reads ahead of the program, so the reader's position is not the program's."),
        caches=Reason("A pipe keeps nothing on the disk."), faults_as="`penstock run`, Pipe mode, `PipeReader`",
    ),
)  # fmt: skip
"""All doors, in the order of the page. A door of another library comes here when it is there."""
