"""Packing: files, tables and Python data sets into shards, with an index and a manifest. See README.md in this folder.

``penstock.pack`` is called (``ps.pack(source, destination)``), and holds what belongs to it: ``ps.pack.writer(url)``,
``ps.pack.verify(url)``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.pack.audit import verify
from penstock.pack.converting import convert
from penstock.pack.options import ADVISED_BYTES, BYTES_MAX, PackOptions, advice
from penstock.pack.packing import Packing, pack
from penstock.pack.progress import Listener, Packed
from penstock.pack.sequence import SequenceWriter, writer
from penstock.pack.verifying import Verified

__all__ = [
    "ADVISED_BYTES",
    "BYTES_MAX",
    "Listener",
    "PackOptions",
    "Packed",
    "Packing",
    "SequenceWriter",
    "Verified",
    "advice", "convert",
    "pack",
    "verify",
    "writer",
]  # fmt: skip


if TYPE_CHECKING:
    from penstock.pack import options as _options
    from penstock.pack import progress as _progress
    from penstock.pack import sequence as _sequence
    from penstock.pack import verifying as _verifying

    class PackModule:
        """What a type checker finds on ``ps.pack``; a ``ModuleType`` would accept every name."""

        __call__ = pack = staticmethod(pack)
        convert = staticmethod(convert)
        verify = staticmethod(verify)
        writer = staticmethod(writer)
        advice = staticmethod(advice)
        PackOptions = _options.PackOptions
        Packed = _progress.Packed
        SequenceWriter = _sequence.SequenceWriter
        Verified = _verifying.Verified

else:

    class PackModule(ModuleType):
        """This module, so that it can be called: ``ps.pack(...)`` and ``ps.pack.writer(...)`` are both what users expect."""

        __call__ = staticmethod(pack)

    sys.modules[__name__].__class__ = PackModule
