"""Command-line programs on a mounted bucket do what they do on local files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from doors.fuse.data_set import Folders

TIME_S_MAX = 80


def run(command: str, cwd: Path, *, code: int = 0, **names: Path) -> str:
    """Run a line of Bash in a directory and return what it wrote; `names` are its variables."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIME_S_MAX,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
        | {key: str(path) for key, path in names.items()},
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def assert_same_files(copy: Path, local: Path) -> None:
    """Assert that two local folders have the same names and bytes."""
    run('diff --recursive --no-dereference "$copy" "$local"', copy, copy=copy, local=local)


@pytest.mark.parametrize(
    "command",
    [
        "find . -mindepth 1 -type d -printf '%P\\n' | sort",
        "find . -type f -printf '%P %s %n\\n' | sort",
        "find . -name '*needle*' -size +10k | sort",
        "find . -depth -type f -path '*/images/*' | sort | tail -n 5",
        "ls -1R",
        "grep -rn needle text | sort | md5sum",
        "grep -rLZ needle . | sort -z | md5sum",
        "grep -rc läuft text | sort",
        "find . -type f -print0 | sort -z | xargs -0 -P 4 -n 20 md5sum | sort",
        "find text -type f -print0 | sort -z | xargs -0 cat | sha256sum",
        "tail -q -c 100 arrays/* | md5sum",
        "for file in shards/*; do dd if=$file bs=7777 skip=3 count=9 status=none | md5sum; done",
        "for file in shards/*; do tar -tvf $file; done",
    ],
)
def test_a_command_prints_the_same(folders: Folders, command: str) -> None:
    """What walks, searches and reads a tree prints the same on the mount as on local files."""
    assert run(command, folders.mounted) == run(command, folders.local)


def test_cp(folders: Folders, tmp_path: Path) -> None:
    """``cp -r`` copies everything, and ``cp --preserve`` also the times."""
    run('cp -r . "$copy"', folders.mounted, copy=tmp_path / "copy")
    assert_same_files(tmp_path / "copy", folders.local)
    (tmp_path / "kept").mkdir()
    run('cp -r --preserve=timestamps text "$copy"', folders.mounted, copy=tmp_path / "kept")
    times = "find text -type f -printf '%P %T@\\n' | sort"
    assert run(times, tmp_path / "kept") == run(times, folders.mounted)


def test_tar(folders: Folders, tmp_path: Path) -> None:
    """``tar`` archives the tree, and unpacks and compares archives that lie in it."""
    run('mkdir "$copy"; tar -cf - . | tar -xf - -C "$copy"', folders.mounted, copy=tmp_path / "copy")
    assert_same_files(tmp_path / "copy", folders.local)
    for root in folders:
        run('mkdir "$to"; for f in shards/*; do tar -xf $f -C "$to"; done', root, to=tmp_path / f"of-{root.name}")
    assert_same_files(tmp_path / f"of-{folders.mounted.name}", tmp_path / f"of-{folders.local.name}")
    assert run('tar -cf "$to/archive" .; tar --compare -f "$to/archive"', folders.mounted, to=tmp_path) == ""


def test_md5sum(folders: Folders, tmp_path: Path) -> None:
    """``md5sum --check`` finds every file of a list right, and a wrong line wrong."""
    run('find . -type f -exec md5sum {} + > "$to/sums"', folders.local, to=tmp_path)
    run('md5sum --check --quiet --strict "$to/sums"', folders.mounted, to=tmp_path)
    first, *_ = (tmp_path / "sums").read_text().splitlines()
    (tmp_path / "sums").write_text(f"{'0' * 32}{first.lstrip(chr(92))[32:]}\n")
    assert "FAILED" in run('md5sum --check "$to/sums"', folders.mounted, to=tmp_path, code=1)


def test_rsync(folders: Folders, tmp_path: Path) -> None:
    """``rsync -a`` copies everything, its quick check then sends nothing, and its delta mends a changed file."""
    copy = tmp_path / "copy"
    run('rsync -a ./ "$copy/"', folders.mounted, copy=copy)
    assert_same_files(copy, folders.local)
    assert run('rsync -ai --omit-dir-times ./ "$copy/"', folders.mounted, copy=copy) == ""
    assert run('rsync -ai --omit-dir-times --checksum ./ "$copy/"', folders.mounted, copy=copy) == ""
    with (copy / "arrays" / "matrix.npy").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"wrong")
    (copy / "more").touch()
    mended = run(
        'rsync -ai --delete --omit-dir-times --checksum --no-whole-file ./ "$copy/"', folders.mounted, copy=copy
    )
    assert "matrix.npy" in mended
    assert "deleting   more" in mended.replace("*", "")
    assert_same_files(copy, folders.local)
