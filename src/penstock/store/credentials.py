"""Access keys: found by the AWS conventions, and refreshed before they expire.

botocore's chain knows environment, config files, profiles, SSO, web identity, container and instance roles. Importing it
takes 0.1 s, so it is used only if arguments and environment do not give keys, region and endpoint.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, CredentialsError
from penstock.system import forks

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    _Call: TypeAlias = "Callable[[Credentials | CredentialsError], None]"

REFRESH_CHECK_S = 60.0
"""botocore renews temporary keys from 15 minutes before they expire; it is called this often, off the data path."""

CHAIN_S_MAX = 60.0
"""Seconds that an operation waits for the chain, because a ``credential_process`` or a login has no deadline."""

_ANONYMOUS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose a profile by AWS_PROFILE or profile=, "
    "or pass anonymous=True for public data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Fixed access keys.

    Attributes:
        access_key: ID of the access key, the public part.
        secret_key: The secret part; never shown.
        session_token: Session token of temporary keys; None for permanent ones. Never shown.
    """

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.access_key or not self.secret_key:
            raise ConfigError(
                "access_key and secret_key must not be empty", hint="anonymous=True sends requests without keys"
            )
        for name in ("access_key", "secret_key", "session_token"):
            value = getattr(self, name) or ""
            if not value.isprintable() or " " in value:  # such as the line break of a file, which would end a header
                raise ConfigError(f"{name} holds white space or a control character", hint="strip() it")


class CredentialProvider:
    """Provides the keys to sign with, and never blocks the thread that submits.

    Args:
        fixed: Keys that never change; None takes those of botocore's chain.
        profile: Name of a profile in the AWS config files; None takes the one that the environment names.

    Attributes:
        current: The keys; None while they are unknown.
        source: Name of their origin, for messages.
    """

    def __init__(self, fixed: Credentials | None, *, profile: str | None = None) -> None:
        self._fixed = fixed
        self._profile = profile
        self._lock = threading.RLock()  # reentrant, because a finaliser may submit while it is held
        self._waiting: list[list[_Call]] = []
        self._running = False
        self._check_due_s = float("inf") if fixed else 0.0
        self._chain: Any = None
        self.current: Credentials | None = fixed
        self.source = "arguments" if fixed else "not resolved yet"
        if fixed is None:
            forks.register(self)

    def recipe(self) -> tuple[Credentials | None, str | None]:
        """Return the arguments with which ``provider`` makes an equal provider in another process."""
        return (None if self.source == "environment" else self._fixed), self._profile

    def now(self) -> Credentials | None:
        """Return the keys; None if ``when_known`` must be used. Starts a renewal in the background if one is due."""
        if time.monotonic() >= self._check_due_s and self.current is not None:
            self._start(None)
        return self.current

    def when_known(self, call: Callable[[Credentials | CredentialsError], None]) -> None:
        """Call `call` with the keys, or with the error if there are none, from another thread, within ``CHAIN_S_MAX``."""
        from penstock.transport import engine

        calls = [call]  # emptied by the answer, so that the timer does not keep a transfer alive
        self._start(calls)
        engine.call_later(CHAIN_S_MAX, lambda: self._answer([calls], _late()))

    def expired(self, used: Credentials | None) -> bool:
        """Forget the keys `used`, which the store calls expired; returns whether there may be others."""
        if self._fixed is not None:
            return False
        with self._lock:
            if self.current is used:
                self.current = None
                self._chain = None
        return True

    def resolve(self) -> Credentials:
        """Wait for the keys; for ``penstock info``.

        Raises:
            CredentialsError: No keys were found.
        """
        return self.current or self._ask()

    def _start(self, calls: list[_Call] | None) -> None:
        with self._lock:
            self._check_due_s = time.monotonic() + REFRESH_CHECK_S
            if calls is not None:
                self._waiting.append(calls)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="penstock-credentials", daemon=True).start()

    def _run(self) -> None:
        result: Credentials | CredentialsError
        try:
            result = self._ask()
        except CredentialsError as error:
            result = error
        except Exception as error:  # a missing profile, a broken config file, ...: the waiting operations must end
            result = CredentialsError(f"the AWS credential chain failed: {error}", hint=_ANONYMOUS_HINT)
        with self._lock:
            if isinstance(result, Credentials):
                self.current = result
            waiting, self._waiting = self._waiting, []
            self._running = False
        self._answer(waiting, result)

    def _answer(self, waiting: list[list[_Call]], result: Credentials | CredentialsError) -> None:
        """Call those that wait and were not called yet."""
        for calls in waiting:
            with self._lock:
                due, calls[:] = calls[:], []
            for call in due:
                call(result)

    def _ask(self) -> Credentials:
        import botocore.exceptions

        frozen, reason = None, "no credentials found"
        try:
            if self._chain is None:
                # session.get_credentials() would return the expired keys again.
                self._chain = (
                    botocore_session(self._profile, _named()).get_component("credential_provider").load_credentials()
                )
            if self._chain is not None:
                frozen = self._chain.get_frozen_credentials()
        except (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            OSError,
            json.JSONDecodeError,
        ) as error:
            reason = f"the AWS credential chain failed: {_reason_of(error)}"
        if frozen is None:  # raised outside of the handler, because a traceback would show the library's error as well
            raise CredentialsError(reason, hint=_ANONYMOUS_HINT)
        self.source = str(self._chain.method)
        return Credentials(
            access_key=frozen.access_key, secret_key=frozen.secret_key, session_token=frozen.token or None
        )

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread and those that wait for it."""
        self._lock = threading.RLock()
        self._waiting = []
        self._running = False


def _reason_of(error: Exception) -> str:
    """Return an error of the chain as text, without the output of a ``credential_process``, which may hold secrets."""
    fields = getattr(error, "kwargs", {})
    if fields.get("provider") == "custom-process" or isinstance(error, json.JSONDecodeError):
        return "the credential_process did not print credentials (its output is not shown, because it may hold secrets)"
    return str(error)


def _late() -> CredentialsError:
    what = f"the AWS credential chain has not answered within {CHAIN_S_MAX:g} s"
    return CredentialsError(what, hint="is a credential_process or a login waiting for input?")


def provider(credentials: Credentials | None, profile: str | None) -> CredentialProvider:
    """Return the process's provider for these arguments; stores with the same arguments share it and its chain."""
    if credentials is None and profile is None:
        access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if access_key and secret_key:
            token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN") or None
            # Keys that a caller passes have another provider, even if they are equal: those keys travel with a pickled store.
            keys = Credentials(access_key=access_key, secret_key=secret_key, session_token=token)
            found = _provider(keys, None, "environment")
            found.source = "environment"
            return found
    return _provider(credentials, None if credentials else profile, _named())


def _named() -> str | None:
    """Return the profile that the environment names; it may change, so it is part of the key under which one is cached."""
    return os.environ.get("AWS_PROFILE")


@lru_cache(maxsize=64)
def _provider(credentials: Credentials | None, profile: str | None, _key: str | None) -> CredentialProvider:
    return CredentialProvider(credentials, profile=profile)


@lru_cache(maxsize=16)
def botocore_session(profile: str | None, _key: str | None) -> Any:
    """Return botocore's session for a profile, or for the one that the environment names.

    Only this module imports botocore.

    Raises:
        ConfigError: The profile is in no config file.
    """
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session(profile=profile)
    try:
        session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:  # no such profile, or a file that cannot be parsed
        reason = str(error)
    else:
        return session
    # Raised outside of the handler, because the parser's error would be its context, and quotes lines of the file.
    raise ConfigError(reason, hint="profiles are sections of ~/.aws/config")


def setting_region(profile: str | None) -> str | None:
    """Return the region that the environment or the config file names, or None."""
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if found or not _config_says("region", profile):
        return found or None
    region = botocore_session(profile, _named()).get_config_variable("region")
    return str(region) if region else None


def setting_endpoint_url(profile: str | None) -> str | None:
    """Return the S3 endpoint that the environment or the config file names (services section first); None for AWS itself."""
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if found or not _config_says("endpoint_url", profile):
        return found or None
    session = botocore_session(profile, _named())
    scoped = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    url = services.get("s3", {}).get("endpoint_url") or scoped.get("endpoint_url")
    return str(url) if url else None


def setting_addressing(profile: str | None) -> str | None:
    """Return ``addressing_style`` of the config file's s3 section, or None."""
    if not _config_says("addressing_style", profile):
        return None
    section = botocore_session(profile, _named()).get_scoped_config().get("s3")
    style = section.get("addressing_style") if isinstance(section, dict) else None
    return str(style) if style in ("path", "virtual") else None


def _config_says(setting: str, profile: str | None) -> bool:
    """Whether botocore has to read the config file for `setting`; False saves its import.

    It has to if the file mentions the setting, if a profile is named, which must then be there, and if the file cannot be
    parsed, because botocore says what is wrong with it.
    """
    if profile is not None or os.environ.get("AWS_PROFILE"):
        return True
    path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    try:
        # no pathlib on the way to the first byte
        with open(os.path.expanduser(path), encoding="utf-8") as file:  # noqa: PTH111, PTH123
            text = file.read()
    except OSError:
        return False
    except UnicodeDecodeError:
        return True
    return setting in text or not _is_ini(text)


def _is_ini(text: str) -> bool:
    """Whether botocore can parse a config file."""
    if not text:
        return True
    import configparser

    try:
        configparser.RawConfigParser().read_string(text)
    except configparser.Error:
        return False
    return True
