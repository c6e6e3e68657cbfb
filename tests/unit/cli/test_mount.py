"""The command line of ``penstock mount``, without a mount: what it makes of its words, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import penstock.mount
from penstock.cli.app import run
from penstock.cli.mount_helper import helper_arguments
from penstock.mount import MountConfig
from penstock.mount.log_file import LogPosition


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[MountConfig]:
    """The mounts that would have been started."""
    configs: list[MountConfig] = []

    def start(config: MountConfig, **_: Any) -> Any:
        configs.append(config)
        return penstock.mount.RunningMount(config, _Process(), LogPosition.at_end(tmp_path / "log"))  # type: ignore[arg-type]

    monkeypatch.setattr(penstock.mount, "start_mount", start)
    return configs


class _Process:
    pid = 7


def test_mountpoints_spelling_is_understood(started: list[MountConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """The options of Mountpoint that mean the same may be written as there."""
    words = "mount s3://bucket /mnt --prefix train/ --cache /nvme/c --max-cache-size 500 --metadata-ttl indefinite --read-only"
    more = "--endpoint-url http://127.0.0.1:1 --region eu --force-path-style --allow-other --uid 5 --gid 6"
    modes = "--dir-mode 0750 --file-mode 0640 --auto-unmount --negative-metadata-ttl 5"
    assert run(f"{words} {more} {modes}".split()) == 0
    (config,) = started
    assert (config.url, config.directory, config.metadata_ttl_s) == ("s3://bucket/train/", "/mnt", math.inf)
    assert (config.uid, config.gid, config.directory_mode, config.file_mode) == (5, 6, 0o750, 0o640)
    assert (config.negative_ttl_s, config.allow_other, config.auto_unmount) == (5, True, True)
    connection = config.connection
    assert connection["cache"] == "/nvme/c:500MiB"
    assert (connection["endpoint_url"], connection["region"], connection["addressing"]) == (
        "http://127.0.0.1:1",
        "eu",
        "path",
    )
    assert "process 7 serves it" in capsys.readouterr().err


def test_paths_do_not_depend_on_the_daemons_directory(started: list[MountConfig], tmp_path: Path) -> None:
    """A relative directory is that of the shell, as source and as mount point."""
    (tmp_path / "data").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert run(["mount", "data", "mounted"]) == 0
    assert (started[0].url, started[0].directory) == (str(tmp_path / "data"), str(tmp_path / "mounted"))


@pytest.mark.parametrize(
    "words", ["-o ro,allow_other,uid=5,umask=027", "-oallow_other,uid=5 -o umask=027,nosuid,noatime"]
)
def test_options_may_be_written_as_in_fstab(words: str, started: list[MountConfig]) -> None:
    """``-o`` takes the options of other FUSE programs, before and after URL and DIR, in one word or two."""
    assert run(["mount", *words.split(), "s3://b/p/", "/mnt"]) == 0
    assert run(["mount", "s3://b/p/", "/mnt", *words.split()]) == 0
    assert started[0] == started[1]
    assert (started[0].allow_other, started[0].uid, started[0].umask) == (True, 5, 0o027)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("remote:bucket/path /mnt", "rclone's remote:bucket is s3://bucket/path"),
        ("bucket /mnt", "a bucket is s3://bucket"),
        ("--vfs-cache-mode full s3://b /mnt", "No such option: --vfs-cache-mode; here, --cache PATH:SIZE"),
        ("s3://b /mnt --daemon", "the mount goes to the background by itself"),
        ("s3://b /mnt --nonsense=3", "No such option: --nonsense"),
        ("s3://b", "URL and DIR are needed"),
        ("s3://b /mnt /other", "unexpected argument '/other'"),
        ("s3://b /mnt --metadata-ttl soon", "--metadata-ttl 'soon' is not a duration"),
        ("s3://b /mnt --file-mode 999", "--file-mode '999' must be octal digits"),
        ("s3://b /mnt --file-mode 7777", "must lie in [0o000, 0o777]"),
        ("s3://b /mnt --umask 8", "--umask '8' must be octal digits"),
        ("s3://b /mnt -o allow_other,use_cache=/tmp", "No such option: --use-cache; here, --cache PATH:SIZE"),
        ("s3://b /mnt -o", "No such option: -o; here, options follow it"),
        ("s3://b /mnt --max-cache-size 5", "--max-cache-size needs --cache"),
        ("s3://b /mnt --uid -4", "uid=-4 must be"),
    ],
)
def test_wrong_words_are_refused(
    words: str, said: str, started: list[MountConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake is one line that says what to write instead, and nothing is started."""
    assert run(["mount", *words.split()]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert started == []


def test_the_helper_of_fstab() -> None:
    """The options of fstab become those of the command; those of ``mount`` itself are left out."""
    options = "odd_one,ro,_netdev,x-systemd.automount,allow_other,cache=/c:1GB,endpoint_url=http://h:1"
    assert helper_arguments(f"s3://b/p/ /mnt -s -n -o {options} -t penstock".split()) == [
        "s3://b/p/", "/mnt", "--odd-one", "--allow-other", "--cache=/c:1GB", "--endpoint-url=http://h:1",
    ]  # fmt: skip
    assert helper_arguments(["s3://b/p/", "/mnt", "-o", "rw,_netdev"]) == ["s3://b/p/", "/mnt"]  # mount adds rw
