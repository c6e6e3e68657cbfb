"""Packing files, tables and Python data sets into shards, with an index and a manifest. See README.md in this folder.

``penstock.pack`` can be called (``ps.pack(source, destination)``), and has further functions: ``ps.pack.writer(url)``,
``ps.pack.convert(source, destination)``, ``ps.pack.verify(url)``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.pack.converting import convert
from penstock.pack.options import ADVISED_BYTES, BYTES_MAX, PackOptions, advice
from penstock.pack.packing import Packing, pack
from penstock.pack.progress import Packed, PackListener
from penstock.pack.sequence import SequenceWriter, writer
from penstock.pack.verification import Verified, verify

__all__ = [
    "ADVISED_BYTES",
    "BYTES_MAX",
    "PackListener",
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
    from penstock.pack import verification as _verification

    class PackModule:
        """The type of ``ps.pack`` for type checkers; a ``ModuleType`` would accept every name."""

        __call__ = pack = staticmethod(pack)
        convert = staticmethod(convert)
        verify = staticmethod(verify)
        writer = staticmethod(writer)
        advice = staticmethod(advice)
        PackOptions = _options.PackOptions
        Packed = _progress.Packed
        SequenceWriter = _sequence.SequenceWriter
        Verified = _verification.Verified

else:

    class CallableModule(ModuleType):
        """A callable module: users expect both ``ps.pack(...)`` and ``ps.pack.writer(...)``."""

        __call__ = staticmethod(pack)

    sys.modules[__name__].__class__ = CallableModule
