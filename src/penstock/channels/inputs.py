"""The definition of a channel: data, mode and options, from the command line, from Python, or from a training job's JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from penstock.config import SEED_MAX, check_whole
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Mode: TypeAlias = Literal["File", "Pipe", "FastFile"]
DataType: TypeAlias = Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"]
Distribution: TypeAlias = Literal["FullyReplicated", "ShardedByS3Key"]
Start: TypeAlias = Literal["complete", "lazy"]

DEFAULT_NAME = "training"
"""Name of the channel that a URL without a name becomes, as in SageMaker's SDK."""

CHANNELS_MAX = 20
ATTRIBUTES_MAX = 16
NAME_CHARACTERS_MAX = 64
PIPES_MAX = 256
"""Largest number of pipes of one channel: each has a thread and a read-ahead of its own."""

_Value = TypeVar("_Value", str, list[Any], dict[str, Any])

_NAME = re.compile(r"[A-Za-z0-9.\-_]+")
_NAMED = re.compile(r"([A-Za-z0-9.\-_]+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChannel:
    """One input channel of a run.

    Attributes:
        name: Name of the channel; 1 to 64 letters, digits, dots, hyphens and underscores.
        url: URL of the prefix, of the manifest, or of a directory of this machine.
        mode: Form in which the program finds the data: as files (``"File"``), as named pipes (``"Pipe"``), or as a mounted file
            system (``"FastFile"``).
        data_type: Meaning of the URL: a prefix, a manifest, or an augmented manifest, which only Pipe mode can read.
        distribution: Whether every host gets all objects, or each its share of them.
        content_type: MIME type of the data, which is passed on to the program; None if it is not stated.
        compression: ``"Gzip"`` decompresses each object, in File and Pipe mode.
        record_wrapper: ``"RecordIO"`` makes each object (or each attribute) one RecordIO record, in Pipe mode.
        shuffle_seed: Seed of the order of the objects, which Pipe mode changes in every epoch; None keeps the order of the
            listing.
        attribute_names: Attributes of an augmented manifest, in the order in which they are streamed.
        copies: Number of pipes that each give all data, in an order of their own; 0 for one ordinary pipe.
        split: Number of pipes that share the data, so that each object is in exactly one; 0 for one ordinary pipe.
        start: Start of the program in File mode: after all files have arrived (``"complete"``), or immediately
            (``"lazy"``); reading a file that has not arrived then waits for it.

    Raises:
        ConfigError: A value is out of bounds, or an option does not fit the mode.
    """

    name: str
    url: str
    mode: Mode = "File"
    data_type: DataType = "S3Prefix"
    distribution: Distribution = "FullyReplicated"
    content_type: str | None = None
    compression: Literal["None", "Gzip"] = "None"
    record_wrapper: Literal["None", "RecordIO"] = "None"
    shuffle_seed: int | None = None
    attribute_names: tuple[str, ...] = ()
    copies: int = 0
    split: int = 0
    start: Start = "complete"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > NAME_CHARACTERS_MAX or self.name in (".", ".."):
            raise ConfigError(
                f"channel name {self.name!r} must be 1 to {NAME_CHARACTERS_MAX} letters, digits, dots, hyphens, underscores"
            )
        if not self.url:
            raise ConfigError(f"channel {self.name!r} has no URL", hint=f"{self.name}=s3://bucket/prefix/")
        for option, value, known in (
            ("mode", self.mode, get_args(Mode)),
            ("type", self.data_type, get_args(DataType)),
            ("distribution", self.distribution, get_args(Distribution)),
            ("compression", self.compression, ("None", "Gzip")),
            ("wrapper", self.record_wrapper, ("None", "RecordIO")),
            ("start", self.start, get_args(Start)),
        ):
            if value not in known:
                raise ConfigError(f"channel {self.name!r}: {option}={value!r} must be one of {', '.join(known)}")
        if self.shuffle_seed is not None:
            check_whole("seed", self.shuffle_seed, 0, SEED_MAX)
        check_whole("copies", self.copies, 0, PIPES_MAX)
        check_whole("split", self.split, 0, PIPES_MAX)
        self._check_mode()

    def _check_mode(self) -> None:
        if self.mode != "Pipe":
            for option, is_given in (
                ("wrapper", self.record_wrapper != "None"),
                ("copies", self.copies),
                ("split", self.split),
                ("type=AugmentedManifestFile", self.data_type == "AugmentedManifestFile"),
            ):
                if is_given:
                    raise ConfigError(
                        f"channel {self.name!r}: {option} is for Pipe mode, and its mode is {self.mode}",
                        hint="mode=pipe",
                    )
        if self.start == "lazy" and self.mode != "File":
            raise ConfigError(
                f"channel {self.name!r}: start=lazy is for File mode, and its mode is {self.mode}", hint="mode=file"
            )
        if self.is_mounted and (self.data_type != "S3Prefix" or self.compression != "None"):
            how = "FastFile mode" if self.mode == "FastFile" else "start=lazy"
            what = f"type={self.data_type}" if self.data_type != "S3Prefix" else "compression"
            raise ConfigError(f"channel {self.name!r}: {how} mounts a prefix as it is, without {what}")
        if self.copies and self.split:
            raise ConfigError(f"channel {self.name!r}: copies and split exclude each other")
        is_augmented = self.data_type == "AugmentedManifestFile"
        if is_augmented != bool(self.attribute_names):
            raise ConfigError(
                f"channel {self.name!r}: type=AugmentedManifestFile and attributes go together",
                hint="attributes=image-ref+label names what is streamed, in this order",
            )
        if len(self.attribute_names) > ATTRIBUTES_MAX:
            raise ConfigError(
                f"channel {self.name!r} has {len(self.attribute_names)} attributes, more than {ATTRIBUTES_MAX}"
            )

    @property
    def is_mounted(self) -> bool:
        """Whether the program reads its data from a mount."""
        return self.mode == "FastFile" or self.start == "lazy"

    def pipes(self) -> list[str]:
        """Return the names of its pipes, without ``_<epoch>``: its own, or one for each copy or part."""
        count = self.copies or self.split
        return [f"{self.name}-{number}" for number in range(count)] if count else [self.name]


def _one_of(*known: str) -> Callable[[str], str]:
    """Return a function that spells a value as one of `known`, whatever its case; ``InputChannel`` refuses unknown ones."""
    by_name = {each.lower(): each for each in known}
    return lambda text: by_name.get(text.lower(), text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a whole number") from None


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "mode": ("mode", _one_of(*get_args(Mode))),
    "type": ("data_type", _one_of(*get_args(DataType))),
    "distribution": ("distribution", _one_of(*get_args(Distribution))),
    "content-type": ("content_type", str),
    "compression": ("compression", _one_of("None", "Gzip")),
    "wrapper": ("record_wrapper", _one_of("None", "RecordIO")),
    "seed": ("shuffle_seed", _whole),
    "attributes": ("attribute_names", lambda text: tuple(text.split("+"))),
    "copies": ("copies", _whole),
    "split": ("split", _whole),
    "start": ("start", _one_of(*get_args(Start))),
}
"""The options of a channel on the command line: the field of ``InputChannel`` that each sets, and how its text is read."""

_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=([^,]*)$")
_UNKNOWN_OPTION = re.compile(r",([a-z\-]+)=[^,/]*$")


def parse_channel(text: str, *, mode: str = "File", name: str | None = None) -> InputChannel:
    """Return the channel that an argument of ``--channel`` describes: ``[NAME=]URL[,OPTION=VALUE]...``.

    Options are taken from the end, so the URL may have commas and equal signs.

    Args:
        text: The argument.
        mode: Mode of a channel that names none, in any case.
        name: Name of the channel; None takes it from the argument.

    Raises:
        ConfigError: An option is unknown, or a value is out of bounds.
    """
    values: dict[str, Any] = {"mode": _OPTIONS["mode"][1](mode)}
    rest = text
    while match := _OPTION.search(rest):
        field, read = _OPTIONS[match[1]]
        values[field] = read(match[2])
        rest = rest[: match.start()]
    if unknown := _UNKNOWN_OPTION.search(rest):
        from difflib import get_close_matches

        near = get_close_matches(unknown[1], _OPTIONS, n=1)
        hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(_OPTIONS)}"
        raise ConfigError(f"a channel has no option {unknown[1]}=", hint=hint)
    if name is not None:
        return InputChannel(name=name, url=rest, **values)
    named = _NAMED.fullmatch(rest)
    name, url = (named[1], named[2]) if named else (DEFAULT_NAME, rest)
    return InputChannel(name=name, url=url, **values)


def channel_of_request(request: Mapping[str, Any], *, mode: str = "File") -> InputChannel:
    """Return the channel that an element of ``InputDataConfig`` in a CreateTrainingJob request describes.

    Args:
        request: The element, with SageMaker's names.
        mode: The job's ``TrainingInputMode``, which counts if the channel has no ``InputMode``.

    Raises:
        ConfigError: A field is missing, not supported, or out of bounds.
    """
    known = {
        "ChannelName",
        "DataSource",
        "ContentType",
        "CompressionType",
        "RecordWrapperType",
        "InputMode",
        "ShuffleConfig",
    }
    _check_fields("a channel", request, known)
    name = field_of(request, "ChannelName", str)
    source = field_of(request, "DataSource", dict) or {}
    if name is None:
        raise ConfigError("a channel of InputDataConfig has no ChannelName")
    if "S3DataSource" not in source:
        raise ConfigError(f"channel {name!r} has no S3DataSource", hint="penstock reads object stores and directories")
    s3 = source["S3DataSource"]
    known = {"S3DataType", "S3Uri", "S3DataDistributionType", "AttributeNames"}
    _check_fields(f"the S3DataSource of channel {name!r}", s3, known)
    shuffle = field_of(request, "ShuffleConfig", dict)
    names = field_of(s3, "AttributeNames", list) or []
    if not all(isinstance(each, str) for each in names):
        raise ConfigError(f"channel {name!r}: AttributeNames must be texts")
    return InputChannel(
        name=name,
        url=field_of(s3, "S3Uri", str) or "",
        mode=request.get("InputMode") or _OPTIONS["mode"][1](mode),
        data_type=s3.get("S3DataType", "S3Prefix"),
        distribution=s3.get("S3DataDistributionType", "FullyReplicated"),
        content_type=field_of(request, "ContentType", str),
        compression=request.get("CompressionType", "None"),
        record_wrapper=request.get("RecordWrapperType", "None"),
        shuffle_seed=None if shuffle is None else shuffle.get("Seed", 0),
        attribute_names=tuple(names),
    )


def field_of(record: Mapping[str, Any], name: str, kind: type[_Value]) -> _Value | None:
    """Return a field of a request; None if there is none.

    Raises:
        ConfigError: It is of another kind.
    """
    value = record.get(name)
    if value is not None and not isinstance(value, kind):
        what = {dict: "an object", list: "a list", str: "text"}[kind]
        raise ConfigError(f"{name} in the request must be {what}, not {value!r:.60}")
    return value


def _check_fields(what: str, given: Any, known: set[str]) -> None:
    if not hasattr(given, "keys"):
        raise ConfigError(f"{what} is a {type(given).__name__}, not an object")
    if unknown := sorted(set(given) - known):
        raise ConfigError(
            f"{what} has {', '.join(unknown)}, which is not supported here", hint=", ".join(sorted(known))
        )


def check_channels(channels: list[InputChannel], *, strict: bool = False) -> None:
    """Check that the channels of one run fit together.

    Args:
        channels: The channels.
        strict: Whether SageMaker's own limits hold, too.

    Raises:
        ConfigError: Two channels have one name, or one channel's pipes have the name of another; or `strict` and a limit of
            SageMaker is exceeded.
    """
    seen: dict[str, str] = {}
    for channel in channels:
        for name in dict.fromkeys((channel.name, *channel.pipes())):
            if name in seen:
                raise ConfigError(f"two channels are named {name!r}", hint="give each its own name: --channel NAME=URL")
            seen[name] = channel.name
    for channel in channels:
        base, _, epoch = channel.name.rpartition("_")
        if epoch.isdecimal() and any(other.mode == "Pipe" and base in other.pipes() for other in channels):
            raise ConfigError(f"channel {channel.name!r} has the name of epoch {epoch} of the pipe {base!r}")
    if not strict:
        return
    for what in _beyond_sagemaker(channels):
        raise ConfigError(what, hint="leave out --strict")


def _beyond_sagemaker(channels: list[InputChannel]) -> Iterator[str]:
    if len(channels) > CHANNELS_MAX:
        yield f"{len(channels)} channels are more than SageMaker's {CHANNELS_MAX}"
    for channel in channels:
        if channel.copies or channel.split:
            yield f"channel {channel.name!r}: SageMaker has neither copies nor split"
        if channel.start != "complete":
            yield f"channel {channel.name!r}: SageMaker has no start=lazy"
        if channel.compression != "None" and channel.mode != "Pipe":
            yield f"channel {channel.name!r}: SageMaker inflates in Pipe mode only"
        if not channel.url.startswith("s3://"):
            yield f"channel {channel.name!r}: {channel.url} is not an s3:// URL"
