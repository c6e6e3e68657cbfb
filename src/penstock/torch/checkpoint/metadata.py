"""Reading ``.metadata``: a pickle, of which only the classes of distributed checkpoints are accepted.

A pickle can name any function to call. PyTorch loads this file without a limit, so that whoever can write to the bucket can run
code in the training job; here, any other name in the file is an error.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from penstock.errors import CheckpointError

_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_NAMES = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "builtins": {"set", "frozenset", "complex", "slice", "range", "list", "dict", "tuple", "int", "float", "str"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Accepts the classes that PyTorch's planners put into the metadata."""

    def find_class(self, module: str, name: str) -> Any:
        found = None
        if name in _NAMES.get(module, ()):
            found = super().find_class(module, name)
        elif module in _MODULES and "." not in name:
            found = super().find_class(module, name)
            if not isinstance(found, type) or found.__module__ != module:  # a function, or what the module imported
                found = None
        elif (
            module == "torch"
            and "." not in name
            and type(value := super().find_class(module, name)).__module__ == "torch"
        ):
            found = value if type(value).__name__ in ("dtype", "layout", "memory_format") else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong into this file")
        return found


def decode_metadata(data: bytes | memoryview, url: str) -> Metadata:
    """Decode a ``.metadata`` file.

    Args:
        data: Contents of the file, uint8[n].
        url: URL of the file, for messages.

    Raises:
        CheckpointError: It is damaged, or it names anything but classes of distributed checkpoints.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"the file cannot be decoded: {error}", url=url) from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("the file holds no metadata of a distributed checkpoint", url=url)
    return metadata
