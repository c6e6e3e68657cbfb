"""Who asks: access keys, found by the AWS conventions and refreshed before they expire.

botocore's chain knows environment, config files, profiles, SSO, web identity, container and instance roles. It costs
0.1 s to import, so it is asked only where keys, region and endpoint are not all given by arguments or environment.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock import forks
from penstock.errors import ConfigError, CredentialsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    _Call: TypeAlias = "Callable[[Credentials | CredentialsError], None]"

REFRESH_CHECK_S = 60.0
"""botocore renews temporary keys from 15 minutes before they expire; we ask it this often, off the data path."""

CHAIN_S_MAX = 60.0
"""How long whoever asks waits for the chain: a ``credential_process`` has no deadline of its own, nor has a login."""

_ANONYMOUS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose a profile by AWS_PROFILE or profile=, "
    "or pass anonymous=True for public data"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Fixed access keys.

    Attributes:
        access_key: Public part.
        secret_key: Never shown.
        session_token: Of temporary keys.
    """

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.access_key or not self.secret_key:
            raise ConfigError("access_key and secret_key must not be empty", hint="anonymous=True asks without keys")
        for name in ("access_key", "secret_key", "session_token"):
            value = getattr(self, name) or ""
            if not value.isprintable() or " " in value:  # of a file read whole: its line break would end a header
                raise ConfigError(f"{name} holds white space or a control character", hint="strip() it")


class CredentialProvider:
    """Gives the keys to sign with, without ever blocking whoever submits.

    Args:
        fixed: Keys that never change; else the chain is asked.
        profile: Name of a profile in the AWS config files.
    """

    def __init__(self, fixed: Credentials | None, *, profile: str | None = None) -> None:
        self._fixed = fixed
        self._profile = profile
        self._lock = threading.RLock()  # a finaliser may cancel, or submit, in the midst of it
        self._waiting: list[list[_Call]] = []
        self._running = False
        self._check_due_s = float("inf") if fixed else 0.0
        self._chain: Any = None
        self.current: Credentials | None = fixed
        self.source = "arguments" if fixed else "not resolved yet"
        if fixed is None:
            forks.register(self)

    def recipe(self) -> tuple[Credentials | None, str | None]:
        """Arguments of ``provider`` that make the like of it in another process."""
        return (None if self.source == "environment" else self._fixed), self._profile

    def now(self) -> Credentials | None:
        """The keys, or None where ``when_known`` must be used. Starts a renewal in the background when one is due."""
        if time.monotonic() >= self._check_due_s and self.current is not None:
            self._start(None)
        return self.current

    def when_known(self, call: Callable[[Credentials | CredentialsError], None]) -> None:
        """Have `call` called with the keys, or why there are none, from another thread, after ``CHAIN_S_MAX`` at most."""
        from penstock.transport import engine

        asked = [call]  # emptied by whoever answers: the timer must not keep a transfer alive
        self._start(asked)
        engine.call_later(CHAIN_S_MAX, lambda: self._answer([asked], _late()))

    def expired(self, used: Credentials | None) -> bool:
        """The store said that `used` are expired: forget them. Returns whether others can be had."""
        if self._fixed is not None:
            return False
        with self._lock:
            if self.current is used:
                self.current = None
                self._chain = None
        return True

    def resolve(self) -> Credentials:
        """The keys, blocking: for ``penstock info``.

        Raises:
            CredentialsError: there are none.
        """
        return self.current or self._ask()

    def _start(self, asked: list[_Call] | None) -> None:
        with self._lock:
            self._check_due_s = time.monotonic() + REFRESH_CHECK_S
            if asked is not None:
                self._waiting.append(asked)
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
        except Exception as error:  # a missing profile, a broken config file: whoever waits must hear
            result = CredentialsError(f"the AWS credential chain failed: {error}", hint=_ANONYMOUS_HINT)
        with self._lock:
            if isinstance(result, Credentials):
                self.current = result
            waiting, self._waiting = self._waiting, []
            self._running = False
        self._answer(waiting, result)

    def _answer(self, waiting: list[list[_Call]], result: Credentials | CredentialsError) -> None:
        """Tell those that were not told yet."""
        for asked in waiting:
            with self._lock:
                calls, asked[:] = asked[:], []
            for call in calls:
                call(result)

    def _ask(self) -> Credentials:
        import botocore.exceptions

        try:
            if self._chain is None:
                # not session.get_credentials(), which would give the expired ones again
                self._chain = (
                    botocore_session(self._profile, _named()).get_component("credential_provider").load_credentials()
                )
            if self._chain is None:
                raise CredentialsError("no credentials found", hint=_ANONYMOUS_HINT)
            frozen = self._chain.get_frozen_credentials()
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, OSError) as error:
            if isinstance(error, CredentialsError):
                raise
            raise CredentialsError(f"the AWS credential chain failed: {error}", hint=_ANONYMOUS_HINT) from error
        self.source = str(self._chain.method)
        return Credentials(
            access_key=frozen.access_key, secret_key=frozen.secret_key, session_token=frozen.token or None
        )

    def after_fork_in_child(self) -> None:
        """See ``forks``."""
        self._lock = threading.RLock()  # a finaliser may cancel, or submit, in the midst of it
        self._waiting = []
        self._running = False


def _late() -> CredentialsError:
    what = f"the AWS credential chain has not answered within {CHAIN_S_MAX:g} s"
    return CredentialsError(what, hint="does a credential_process, or a login, wait for somebody?")


def provider(credentials: Credentials | None, profile: str | None) -> CredentialProvider:
    """The process's provider for these arguments: one chain, asked once, for all stores that share it."""
    if credentials is None and profile is None:
        access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        if access_key and secret_key:
            token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN") or None
            found = _provider(
                Credentials(access_key=access_key, secret_key=secret_key, session_token=token), None, None
            )
            found.source = "environment"
            return found
    return _provider(credentials, None if credentials else profile, _named())


def _named() -> str | None:
    """The profile that the environment names: part of what is remembered, for it may change."""
    return os.environ.get("AWS_PROFILE")


@lru_cache(maxsize=64)
def _provider(credentials: Credentials | None, profile: str | None, _key: str | None) -> CredentialProvider:
    return CredentialProvider(credentials, profile=profile)


@lru_cache(maxsize=16)
def botocore_session(profile: str | None, _key: str | None) -> Any:
    """Botocore's session for a profile, or for the one that the environment names: the one place that imports it.

    Raises:
        ConfigError: the profile is in no config file.
    """
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session(profile=profile)
    try:
        session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:  # no such profile, or a file that is none
        reason = str(error)
    else:
        return session
    # By itself: the parser's error, which would stand behind it, quotes the lines of the file that it cannot read.
    raise ConfigError(reason, hint="profiles are sections of ~/.aws/config")


def setting_region(profile: str | None) -> str | None:
    """The region by environment or config file, or None."""
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if found or not _config_says("region", profile):
        return found or None
    region = botocore_session(profile, _named()).get_config_variable("region")
    return str(region) if region else None


def setting_endpoint_url(profile: str | None) -> str | None:
    """The S3 endpoint by environment or config file (services section first), or None for AWS itself."""
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
    """``addressing_style`` of the config file's s3 section, or None."""
    if not _config_says("addressing_style", profile):
        return None
    section = botocore_session(profile, _named()).get_scoped_config().get("s3")
    style = section.get("addressing_style") if isinstance(section, dict) else None
    return str(style) if style in ("path", "virtual") else None


def _config_says(setting: str, profile: str | None) -> bool:
    """Whether the config file may say something of `setting`: where its name is not in it, botocore's import is spared.

    A profile that somebody names is looked for in any case: it has to be there. So is what is wrong with a file that
    is none.
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
    """Whether botocore can parse a config file; where nothing is in it, that is known without a parser."""
    if not text:
        return True
    import configparser

    try:
        configparser.RawConfigParser().read_string(text)
    except configparser.Error:
        return False
    return True
