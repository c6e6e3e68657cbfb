"""FsspecStore beyond the contract: what it says when it cannot work, and what it does not say."""

import builtins
import re

import pytest

from penstock.errors import ConfigError, ObjectMissingError
from penstock.store.fsspec import FsspecStore
from penstock.version import install_hint


def test_unknown_protocols_are_refused():
    """A protocol that fsspec does not know is the caller's error, named, with those there are."""
    with pytest.raises(ConfigError, match=r"nonesuch.*Hint: .*s3://.*file:///.*https://"):
        FsspecStore("nonesuch://bucket/path")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    """Without the package the message says what to install."""
    real = builtins.__import__

    def absent(name, *rest):
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=re.escape(install_hint("fsspec"))):
        FsspecStore("memory://x")


def test_passwords_in_urls_are_not_shown():
    """What stands before the host's ``@`` appears in no description."""
    store = FsspecStore("memory://user:secret@host/path")
    assert "secret" not in store.describe("k") + repr(store)
    with pytest.raises(ObjectMissingError) as caught:
        store.read("none")
    assert "secret" not in str(caught.value)
