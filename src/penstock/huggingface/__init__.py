"""The interface to Hugging Face's ``datasets`` and transformers. No other part of penstock imports them."""

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr, needing

with needing("datasets", "penstock.huggingface needs Hugging Face's datasets. Hint: pip install 'datasets>=4'"):
    from penstock.huggingface.iterable import dataset, features_of

if TYPE_CHECKING:
    from penstock.huggingface.trainer import TrainerCallback as TrainerCallback
else:  # it needs transformers, which the others do not
    __getattr__ = lazy_getattr(__name__, {"TrainerCallback": "trainer"})

__all__ = ["TrainerCallback", "dataset", "features_of"]
