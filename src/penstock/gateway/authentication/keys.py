"""Access keys: who may sign requests, and what each key permits; URLs that are signed with a key.

A set of keys never changes; reloading makes a new set.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.system.private import others_can_read
from penstock.transport import Signing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.gateway.config import AccessPoint

KEYS_VARIABLE = "PENSTOCK_GATEWAY_KEYS"
ANONYMOUS = "anonymous"
"""Access key of a line that says what unsigned requests may do; its secret is empty."""

_KEYS_MAX = 10_000
_FILE_BYTES_MAX = 4 << 20
_ID = re.compile(r"[!-~]{3,128}")
_SECRET_LENGTH_MIN = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_HINT = "ACCESS:SECRET:rw or ACCESS:SECRET:ro, with :NAME+NAME after it for some access points only"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessKey:
    """One key.

    Attributes:
        access_key: ID of the key, the public part.
        secret_key: The secret part; never shown.
        may_write: Whether it may change objects.
        access_points: Names of the buckets and access points that it may use; None for all.
        is_internal: Whether it is the gateway's own, which is not subject to the keys that an access point names.
    """

    access_key: str
    secret_key: str = field(repr=False)
    may_write: bool = False
    access_points: frozenset[str] | None = None
    is_internal: bool = False

    @classmethod
    def generate(cls) -> AccessKey:
        """Return a new read-only key with which the processes of one gateway sign URLs for each other."""
        return cls(
            access_key=f"INTERNAL{secrets.token_hex(8).upper()}", secret_key=secrets.token_urlsafe(32), is_internal=True
        )


class AccessKeys:
    """A fixed set of keys, by ID.

    Args:
        keys: The keys; at most 10 000.
        restricted: IDs of the keys that may use an access point, by its name. Names that are not in it are open to all keys.

    Raises:
        ConfigError: Two keys have one ID, there are too many, or `restricted` names a key that does not exist.
    """

    __slots__ = ("_anonymous", "_keys", "_restricted")

    def __init__(
        self, keys: Iterable[AccessKey] = (), *, restricted: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        self._keys: dict[str, AccessKey] = {}
        for key in keys:
            if key.access_key in self._keys:
                raise ConfigError(f"the access key {key.access_key!r} is given twice")
            self._keys[key.access_key] = key
        if len(self._keys) > _KEYS_MAX:
            raise ConfigError(f"{len(self._keys)} access keys exceed the limit of {_KEYS_MAX}")
        self._anonymous = self._keys.pop(ANONYMOUS, None)
        self._restricted = {name: frozenset(ids) for name, ids in (restricted or {}).items()}
        for name, ids in self._restricted.items():
            if unknown := ids - self._keys.keys():
                raise ConfigError(
                    f"the access point {name!r} is for the access key {min(unknown)!r}, which does not exist",
                    hint="IDs of keys are compared exactly",
                )

    def __repr__(self) -> str:
        return f"<AccessKeys {len(self._keys)} keys>"

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def anonymous(self) -> AccessKey | None:
        """Key that stands for unsigned requests; None if they are refused."""
        return self._anonymous

    def get(self, access_key: str) -> AccessKey | None:
        """Return the key with this ID."""
        return self._keys.get(access_key)

    def may_use(self, access_key: str, bucket: str) -> bool:
        """Return whether the key with this ID may use a bucket or access point; an empty ID stands for unsigned requests."""
        key = self._keys.get(access_key) if access_key else self._anonymous
        if key is None or (key.access_points is not None and bucket not in key.access_points):
            return False
        allowed = self._restricted.get(bucket)
        return allowed is None or key.is_internal or access_key in allowed

    def with_key(self, key: AccessKey) -> AccessKeys:
        """Return a set that contains `key` as well, with the same restrictions."""
        return AccessKeys([*self._all(), key], restricted=self._restricted)

    def for_access_points(self, access_points: Iterable[AccessPoint]) -> AccessKeys:
        """Return the same keys, restricted to the access points whose ``keys`` name them.

        Raises:
            ConfigError: An access point names a key that does not exist.
        """
        return AccessKeys(self._all(), restricted={point.name: point.keys for point in access_points if point.keys})

    def _all(self) -> list[AccessKey]:
        return [*self._keys.values(), *([self._anonymous] if self._anonymous is not None else [])]

    @classmethod
    def parse(cls, text: str, *, source: str) -> AccessKeys:
        """Read keys from a text.

        Each key is ``ACCESS:SECRET:rw`` or ``ACCESS:SECRET:ro``; a list of access points may follow:
        ``ACCESS:SECRET:ro:train+eval``. Keys are separated by line breaks or commas. ``#`` begins a comment at the start of a
        line, or after white space. The line ``anonymous::ro`` allows unsigned requests, with the same optional list.

        Args:
            text: The text.
            source: Origin of `text` for messages: the path of a file, or the name of a variable.

        Raises:
            ConfigError: A key is not valid. The message has its line, and never a secret.
        """
        keys: dict[str, AccessKey] = {}
        for number, line in enumerate(text.splitlines(), 1):
            for entry in re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split(","):
                if entry.strip():
                    key = _parse_key(entry.strip(), place=f"{source}, line {number}")
                    if key.access_key in keys:
                        raise ConfigError(f"{source}, line {number}: the access key {key.access_key!r} is given twice")
                    keys[key.access_key] = key
        return cls(keys.values())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, is_exposed: bool) -> AccessKeys:
        """Read keys from a file; ``parse`` describes its lines.

        Args:
            path: Path of the file.
            is_exposed: Whether the gateway listens beyond loopback. Then a file that group or others can read is refused;
                otherwise it is a warning.

        Raises:
            ConfigError: The file cannot be read, others can read or write it, a line is not valid, or there is no key.
        """
        place = Path(path)
        try:
            with place.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"the file of access keys {place} cannot be read: {error.strerror}") from None
        _check_mode(place, status, is_exposed=is_exposed)
        if len(data) > _FILE_BYTES_MAX:
            raise ConfigError(f"{place} has more than {_FILE_BYTES_MAX} bytes, too many for a file of access keys")
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(f"{place} is not UTF-8, so it is not a file of access keys") from None
        keys = cls.parse(text, source=str(place))
        if not keys and keys.anonymous is None:
            raise ConfigError(f"{place} contains no access key", hint=_HINT)
        return keys

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AccessKeys:
        """Read keys from ``PENSTOCK_GATEWAY_KEYS``; without it there are none. ``parse`` describes the text.

        Raises:
            ConfigError: A key is not valid.
        """
        return cls.parse(environment.get(KEYS_VARIABLE, ""), source=KEYS_VARIABLE)


def _check_mode(place: Path, status: os.stat_result, *, is_exposed: bool) -> None:
    """Refuse a file of secrets that other users can write, and one that they can read if that matters."""
    if not stat.S_ISREG(status.st_mode):
        return  # a pipe, such as /dev/fd/3 of a secret manager, has no readers besides this one
    mode = stat.S_IMODE(status.st_mode)
    hint = f"chmod 600 {place}"
    if status.st_uid not in (os.geteuid(), 0) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users can write to the file of access keys {place} (mode {mode:04o})", hint=hint)
    if others_can_read(status):
        what = f"other users can read the file of access keys {place} (mode {mode:04o})"
        if is_exposed:
            raise ConfigError(f"{what}, and the gateway listens beyond loopback", hint=hint)
        warnings.warn(f"{what}; {hint}", stacklevel=3)


def _parse_key(entry: str, *, place: str) -> AccessKey:
    access_key, *rest = entry.split(":")
    scope = rest[1].strip() if len(rest) in (2, 3) else ""
    if scope not in ("rw", "ro"):
        raise ConfigError(f"{place} is not an access key with its scope", hint=_HINT)
    secret_key, names = rest[0], rest[2].strip() if len(rest) == 3 else None
    if access_key == ANONYMOUS:
        if secret_key or scope == "rw":
            raise ConfigError(f"{place}: unsigned requests have no secret and never write", hint="anonymous::ro")
    else:
        _check_pair(access_key, secret_key, place=place)
    points = None if names is None else frozenset(names.split("+"))
    for name in sorted(points or ()):
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{place}: the list of access points of {access_key!r} has a name that is not valid", hint=_HINT
            )
    return AccessKey(access_key=access_key, secret_key=secret_key, may_write=scope == "rw", access_points=points)


def _check_pair(access_key: str, secret_key: str, *, place: str) -> None:
    if not _ID.fullmatch(access_key) or not set(access_key).isdisjoint("/=;"):
        raise ConfigError(
            f"{place}: the ID of an access key must have 3 to 128 ASCII characters, without white space and /=;",
            hint=_HINT,
        )
    if (
        len(secret_key) < _SECRET_LENGTH_MIN
        or not secret_key.isascii()
        or not secret_key.isprintable()
        or " " in secret_key
    ):
        raise ConfigError(
            f"{place}: the secret of {access_key!r} must have {_SECRET_LENGTH_MIN} or more ASCII characters, without spaces",
            hint="python -c 'import secrets; print(secrets.token_urlsafe(30))'",
        )


def presign(
    url: str,
    key: AccessKey,
    *,
    method: str = "GET",
    expires_s: int = 3600,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Return `url` with a signature of `key`, which every process that has the key verifies.

    Args:
        url: ``http(s)://host[:port]/path`` of the gateway without a query; the path is percent-encoded.
        key: Key to sign with: the gateway's internal one (``AccessKey.generate``), or a client's.
        method: HTTP method that the URL permits.
        expires_s: Seconds for which the URL is valid, from 1 to 604 800.
        query: Further parameters of the query, which the signature covers.
        headers: Headers that must be sent with the request as they are, besides ``Host``.

    Raises:
        ConfigError: `expires_s` is out of bounds, or `url` has a query.
    """
    signing = Signing(key.access_key, key.secret_key, None, "us-east-1")
    return signing.presigned(method, url, expires_s=expires_s, query=query, headers=headers)
