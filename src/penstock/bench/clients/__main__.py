"""``python -m penstock.bench.clients NAME``: the process of one client; see ``loop.py``."""

from __future__ import annotations

import importlib
import sys

from penstock.bench.clients.loop import serve

if __name__ == "__main__":
    serve(lambda **options: importlib.import_module(f"penstock.bench.clients.{sys.argv[1]}").CLIENT(**options))
