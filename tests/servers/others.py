"""Small S3 servers that people use in the place of a real one, independent of the everyday test server."""

from __future__ import annotations

import shutil
import sys
import sysconfig

from servers.daemon import Daemon


class Moto(Daemon):
    """moto's server, which many test suites use; it holds everything in memory.

    Args:
        crc32c: False runs it as it is without the package crc32c: it then keeps a CRC32 and calls it a CRC32C.
    """

    def __init__(self, *, crc32c: bool = True) -> None:
        hide = "" if crc32c else "sys.modules['crc32c'] = None; "
        code = f"import sys; {hide}from moto.server import main; main(['-H', '127.0.0.1', '-p', '{{port}}'])"
        super().__init__([sys.executable, "-P", "-c", code])


class Rclone(Daemon):
    """``rclone serve s3`` on a folder: its ETags come without quotes in listings, and it looks at no ``If-Match``."""

    def __init__(self) -> None:
        program = shutil.which("rclone", path=sysconfig.get_path("scripts")) or "rclone"
        where = ["--addr", "127.0.0.1:{port}", "--auth-key", "{access_key},{secret_key}", "--config", ""]
        super().__init__([program, "serve", "s3", *where, "{folder}"])
