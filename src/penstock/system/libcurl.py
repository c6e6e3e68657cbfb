"""``pycurl`` with the libcurl that it was built with, also in a process where TensorFlow has loaded another one.

TensorFlow exports the functions of its own, older libcurl to the whole process. An extension module that is loaded after it,
or that looks up a function after it, would get those, and pycurl then refuses to work, or mixes two versions. Therefore all
functions are looked up when the module is loaded (``RTLD_NOW``). If there is another libcurl in the process by then, pycurl's
own takes precedence (``RTLD_DEEPBIND``). This flag breaks allocators that ``LD_PRELOAD`` names, so it is not used with them.

Source: dlopen(3). Seen with tensorflow-cpu 2.21 (libcurl 8.11) and pycurl 7.49 (libcurl 8.23).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from typing import Any


def has_foreign_libcurl() -> bool:
    """Whether a library has exported libcurl's functions to the whole process."""
    return hasattr(ctypes.CDLL(None), "curl_version")


def _load() -> Any:
    foreign = has_foreign_libcurl()
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | (os.RTLD_DEEPBIND if foreign and not os.environ.get("LD_PRELOAD") else 0))
    try:
        return importlib.import_module("pycurl")
    except ImportError as error:
        if foreign:
            error.add_note("another library has loaded its own libcurl; import penstock.store before it")
        raise
    finally:
        sys.setdlopenflags(flags)


pycurl: Any = _load()
