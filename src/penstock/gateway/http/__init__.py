"""Connections, requests and answers: everything that knows HTTP and S3's XML."""

from penstock.gateway.http.access_log import AccessLog, AccessLogWriter, AccessRecord
from penstock.gateway.http.front import Front

__all__ = ["AccessLog", "AccessLogWriter", "AccessRecord", "Front"]
