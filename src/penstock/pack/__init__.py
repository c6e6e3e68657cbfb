"""Packing files, tables and Python data sets into shards, with an index and a manifest. See README.md in this folder.

``penstock.pack`` can be called (``ps.pack(source, destination)``), and has further functions: ``ps.pack.writer(url)``,
``ps.pack.convert(source, destination)``, ``ps.pack.verify(url)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr, make_callable

if TYPE_CHECKING:
    from penstock.pack.converting import convert as convert
    from penstock.pack.options import ADVISED_BYTES as ADVISED_BYTES
    from penstock.pack.options import BYTES_MAX as BYTES_MAX
    from penstock.pack.options import PackOptions as PackOptions
    from penstock.pack.options import advice as advice
    from penstock.pack.packing import Packing as Packing
    from penstock.pack.packing import pack as pack
    from penstock.pack.recipes import Packed as Packed
    from penstock.pack.recipes import PackListener as PackListener
    from penstock.pack.sequence import SequenceWriter as SequenceWriter
    from penstock.pack.sequence import writer as writer
    from penstock.pack.verification import Verified as Verified
    from penstock.pack.verification import verify as verify

_ORIGIN = {
    "convert": "converting",
    **dict.fromkeys(("ADVISED_BYTES", "BYTES_MAX", "PackOptions", "advice"), "options"),
    **dict.fromkeys(("Packing", "pack"), "packing"),
    **dict.fromkeys(("Packed", "PackListener"), "recipes"),
    **dict.fromkeys(("SequenceWriter", "writer"), "sequence"),
    **dict.fromkeys(("Verified", "verify"), "verification"),
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table


if TYPE_CHECKING:
    from penstock.pack import options as _options
    from penstock.pack import recipes as _recipes
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
        Packed = _recipes.Packed
        SequenceWriter = _sequence.SequenceWriter
        Verified = _verification.Verified

else:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
    make_callable(__name__, "pack")
