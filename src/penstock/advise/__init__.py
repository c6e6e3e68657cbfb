"""Measures a store, this machine and a data set, and says what to change. See README.md in this folder.

``penstock.advise`` can be called: ``ps.advise(url)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr, make_callable

if TYPE_CHECKING:
    from penstock.advise.measurement import advise as advise
    from penstock.advise.model import predict_samples_per_s as predict_samples_per_s
    from penstock.advise.recommendations import recommend as recommend

    class AdviseModule:
        """The type of ``ps.advise`` for type checkers; a ``ModuleType`` would accept every name."""

        __call__ = advise = staticmethod(advise)
        recommend = staticmethod(recommend)
        predict_samples_per_s = staticmethod(predict_samples_per_s)

else:
    _ORIGIN = {"advise": "measurement", "predict_samples_per_s": "model", "recommend": "recommendations"}
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
    make_callable(__name__, "advise")
