"""How tests reach an S3 server."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.testing.s3_server import S3Server


def connection_to(server: S3Server) -> dict[str, Any]:
    """The arguments with which ``penstock.connect`` and all that takes the same reach `server`."""
    keys = ps.Credentials(access_key=server.access_key, secret_key=server.secret_key)
    return {"endpoint_url": server.endpoint_url, "region": server.region, "credentials": keys}
