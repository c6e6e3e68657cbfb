"""Files and variables of access keys: what they mean, and what is refused without showing a secret."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.gateway.authentication import AccessKey, AccessKeys
from penstock.gateway.config import AccessPoint

SECRET = "s3cr3t/Long+Enough"


def test_lines_commas_and_comments_separate_keys() -> None:
    """The grammar of a file is also that of the variable."""
    text = f"# keys of the team\n\nONE:{SECRET}:rw, TWO:{SECRET}#2:ro # the second\r\nSIX:{SECRET}:ro:train+eval\n"
    keys = AccessKeys.parse(text, source="test")
    assert len(keys) == 3
    one, two, six = keys.get("ONE"), keys.get("TWO"), keys.get("SIX")
    assert one is not None
    assert one.may_write
    assert one.secret_key == SECRET
    assert one.access_points is None
    assert two is not None
    assert not two.may_write
    assert two.secret_key == f"{SECRET}#2"
    assert six is not None
    assert six.access_points == {"train", "eval"}
    assert keys.get("one") is None


def test_scopes_and_access_points_restrict_each_other() -> None:
    """A key is good for what both its own list and the access point's list allow."""
    keys = AccessKeys.parse(f"ALL:{SECRET}:rw,TRAIN:{SECRET}:ro:train,anonymous::ro:public", source="test")
    points = [
        AccessPoint(name="train", upstream="memory://a"),
        AccessPoint(name="eval", upstream="memory://a", keys=("ALL",)),
    ]
    keys = keys.for_access_points(points)
    table = {
        (key, name): keys.may_use(key, name)
        for key in ("ALL", "TRAIN", "", "NONE")
        for name in ("train", "eval", "public")
    }
    assert {pair for pair, allowed in table.items() if allowed} == {
        ("ALL", "train"), ("ALL", "eval"), ("ALL", "public"), ("TRAIN", "train"), ("", "public"),
    }  # fmt: skip
    internal = AccessKey.generate()
    for each in (keys.with_key(internal), keys.with_key(internal).for_access_points(points)):
        assert each.may_use(internal.access_key, "eval")
        assert not each.may_use("TRAIN", "eval")


def test_an_access_point_for_an_unknown_key_is_an_error() -> None:
    """A mistyped ID would otherwise lock everybody out without a word."""
    keys = AccessKeys.parse(f"ONE:{SECRET}:rw", source="test")
    with pytest.raises(ConfigError, match="'TWO', which does not exist"):
        keys.for_access_points([AccessPoint(name="train", upstream="memory://a", keys=("TWO",))])


@pytest.mark.parametrize(
    "entry",
    [
        f"ONE:{SECRET}",
        f"ONE:{SECRET}:wr",
        f"ONE:{SECRET}:rw:a:b",
        f"ONE:{SECRET}:ro:",
        f"ONE:{SECRET}:ro:a++b",
        f"ONE:{SECRET}:ro:../a",
        f"O N:{SECRET}:ro",
        f"O/E:{SECRET}:ro",
        f":{SECRET}:ro",
        "ONE:s3c:ro",
        f"ONE:{SECRET} {SECRET}:ro",
        f"ONE:{SECRET}\u00e9:ro",
        f"anonymous:{SECRET}:ro",
        "anonymous::rw",
        f"OK:{SECRET}:rw,OK:{SECRET}:ro",
        SECRET,
    ],
)
def test_what_is_no_key_is_refused_with_its_line_and_without_the_secret(entry: str) -> None:
    """The message helps to find the line, and can be pasted anywhere."""
    with pytest.raises(ConfigError) as caught:
        AccessKeys.parse(f"# comment\n{entry}\n", source="keys.txt")
    assert "line 2" in str(caught.value)
    assert "s3c" not in str(caught.value)


def test_secrets_are_in_no_repr() -> None:
    """Keys may be logged."""
    keys = AccessKeys.parse(f"ONE:{SECRET}:rw", source="test")
    assert SECRET not in f"{keys!r} {keys.get('ONE')!r} {keys}"


def test_a_file_that_others_can_read_is_refused_where_it_matters(tmp_path: Path) -> None:
    """On loopback it is a warning; beyond it is an error."""
    path = tmp_path / "keys"
    path.write_text(f"ONE:{SECRET}:rw\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*beyond loopback.*chmod 600"):
        AccessKeys.from_file(path, is_exposed=True)
    with pytest.warns(UserWarning, match="mode 0640"):
        assert len(AccessKeys.from_file(path, is_exposed=False)) == 1
    path.chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(AccessKeys.from_file(path, is_exposed=True)) == 1
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="can write"):
        AccessKeys.from_file(path, is_exposed=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"# nothing\n", "no access key"), (b"\xff\xfe", "not UTF-8"), (b"#" * (5 << 20), "more than")],
)
def test_a_file_without_keys_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    """An empty file would otherwise open the gateway to everybody."""
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        AccessKeys.from_file(path, is_exposed=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        AccessKeys.from_file(tmp_path / "missing", is_exposed=True)


def test_the_environment_has_the_same_grammar() -> None:
    """Without the variable there are no keys."""
    assert len(AccessKeys.from_environment({})) == 0
    keys = AccessKeys.from_environment({"PENSTOCK_GATEWAY_KEYS": f"ONE:{SECRET}:rw,TWO:{SECRET}:ro"})
    assert len(keys) == 2


def test_there_is_a_limit() -> None:
    """A file of another kind does not fill the memory."""
    with pytest.raises(ConfigError, match="10000"):
        AccessKeys(AccessKey(access_key=f"K{number}", secret_key=SECRET) for number in range(10_001))
