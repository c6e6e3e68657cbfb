"""Checkpoints: files that ``torch.save`` writes to, and that become objects when they are closed."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from penstock import compose
from penstock.errors import ConfigError
from penstock.store.writing import Writer

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.types import Core, Key

_EXAMPLE = "s3://bucket/checkpoints/0001.pt"


_TORCH_ARCHIVE = "inline_container"
"""The file of PyTorch that writes archives; its errors name it. Source: caffe2/serialize/inline_container.cc."""


class CheckpointWriter(Writer):
    """A ``Writer`` that warns if it is dropped without being closed, so that a checkpoint that was not stored is noticed.

    ``torch.save`` does not close its file, so ``torch.save(model, checkpoint_writer(url))`` without ``with`` stores nothing.
    """

    _requests_min = 8
    """``torch.save`` computes between the parts, and rarely waits for them, so their number would hardly grow."""

    MADE_BY: ClassVar[str] = "ps.torch.checkpoint_writer(url)"
    """The call that the user made, for the warning."""

    def __init__(self, core: Core, key: Key, *, part_bytes: int | None = None, if_absent: bool = False) -> None:
        super().__init__(core, key, part_bytes=part_bytes, if_absent=if_absent)
        self._process_id = os.getpid()
        self._failure: BaseException | None = None

    def write(self, data: Any, /) -> int:
        """Take all of `data`; see ``Writer.write``."""
        try:
            return super().write(data)
        except BaseException as error:
            self._failure = error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file, or abort after an exception.

        Raises:
            BaseException: The one that interrupted ``write``, a ``StoreError`` or Ctrl-C, in place of the ``RuntimeError`` that
                ``torch.save`` raises because its archive then lacks bytes.
        """
        failure, self._failure = self._failure, None  # which has a traceback that refers to this writer
        super().__exit__(kind, error, trace)
        if failure is not None and isinstance(error, RuntimeError) and _TORCH_ARCHIVE in str(error):
            raise failure from None

    def __del__(self) -> None:
        """Warn if bytes were written but not committed; as with every writer, they are dropped."""
        if not self.closed and self.tell() and self._process_id == os.getpid():
            warnings.warn(
                f"{self.name}: {self.tell()} bytes were written and dropped, because the file was never closed. "
                f"Hint: with {self.MADE_BY} as file: torch.save(obj, file)",
                RuntimeWarning,
                stacklevel=2,
            )


def checkpoint_writer(
    url: str | os.PathLike[str], *, part_bytes: int | None = None, if_absent: bool = False, **options: Any
) -> CheckpointWriter:
    """Open a file for ``torch.save``: ``with ps.torch.checkpoint_writer(url) as file: torch.save(state, file)``.

    The whole object becomes visible when the ``with`` ends normally. After an exception inside it, or if the process ends
    before, nothing becomes visible, and an existing object of the same key remains unchanged.
    ``torch.load(ps.open(url))`` reads the checkpoint.

    Args:
        url: URL of the object, with any scheme that ``penstock.connect`` supports.
        part_bytes: Size of the first parts in bytes, at least 5 MiB on S3.
        if_absent: Whether to refuse to replace an object; the end of the ``with`` then raises ``ObjectExistsError``.
        **options: The same options as for ``penstock.connect``.

    Raises:
        ConfigError: The URL does not name an object, or an option is invalid.

    Cost: The memory of ``penstock.store.Writer``: parts are uploaded, 8 to 24 at a time, while ``torch.save`` writes.
    """
    root, key = split_file(url)
    return CheckpointWriter(compose.connect(root, **options), key, part_bytes=part_bytes, if_absent=if_absent)


def split_file(url: Any) -> tuple[str, Key]:
    """Split the URL of a checkpoint that is one object into the URL of a store and the key in it.

    Raises:
        ConfigError: It is no URL or path, or it names a directory.
    """
    if not isinstance(url, str | os.PathLike):
        hint = "torch.save and torch.load take file objects" if hasattr(url, "read") else _EXAMPLE
        raise ConfigError(f"url= must be a URL or a path, not {type(url).__name__}", hint=hint)
    root, key = compose.split(url)
    if not key or key.endswith("/"):
        raise ConfigError(f"{os.fspath(url)!r} does not name an object", hint=_EXAMPLE)
    return root, key
