"""Ceph's RGW on loopback: a production S3, independent of the everyday test server. See ``ceph.sh``."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from penstock.testing.s3_server import S3Server, free_ports

SCRIPT = Path(__file__).with_name("ceph.sh")
START_S_MAX = 300
"""The first start may install 100 MB of packages; later ones take seconds."""


class Ceph(S3Server):
    """One running Ceph: monitor, OSD in memory, RGW."""

    def __init__(self) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self._folder = tempfile.mkdtemp(prefix="penstock-ceph-")
        rgw_port, mon_port = free_ports(2)
        self.endpoint_url = f"http://127.0.0.1:{rgw_port}"
        command = [str(SCRIPT), "up", self._folder, str(rgw_port), str(mon_port), self.access_key, self.secret_key]
        try:
            # its output goes to files: a pipe would stay open in the daemons, and this would wait for them
            with Path(self._folder, "up.log").open("wb") as log:
                subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=START_S_MAX)
        except BaseException as error:
            error.add_note(Path(self._folder, "up.log").read_text(errors="replace")[-3000:])
            self.close()
            raise

    def close(self) -> None:
        """Stop the daemons and remove their folder."""
        if Path(self._folder).exists():
            subprocess.run([str(SCRIPT), "down", self._folder], check=True, timeout=60)
            shutil.rmtree(self._folder, ignore_errors=True)
