"""Whether tests can mount."""

from __future__ import annotations

import os

import pytest

HAS_FUSE = os.access("/dev/fuse", os.R_OK | os.W_OK)
"""Whether this process may use the kernel's FUSE."""

needs_fuse = pytest.mark.skipif(not HAS_FUSE, reason="needs /dev/fuse")
