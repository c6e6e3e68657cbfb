"""Access keys: what can be none is refused where it is given."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.store.credentials import Credentials, provider


@pytest.mark.parametrize("name", ["access_key", "secret_key", "session_token"])
@pytest.mark.parametrize("value", ["key\n", "a b", "a\x00", "\tkey"])
def test_white_space_in_a_key_is_refused_by_name_alone(name: str, value: str) -> None:
    """A key read from a file with its line break is an error that names the field and shows no secret."""
    keys = {"access_key": "AKID", "secret_key": "secret/+=", "session_token": None, name: value}
    with pytest.raises(ConfigError, match=name) as caught:
        Credentials(**keys)  # type: ignore[arg-type]
    assert value not in str(caught.value)


def test_keys_that_are_passed_travel_also_if_the_environment_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with explicit keys pickles them; one with the keys of the environment leaves them there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKSAME")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "same-secret")
    keys = Credentials(access_key="AKSAME", secret_key="same-secret")
    passed, found = provider(keys, None), provider(None, None)
    assert passed.recipe() == (keys, None)
    assert found.recipe() == (None, None)
