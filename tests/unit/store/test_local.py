"""LocalStore beyond the contract: links, hidden names, full and read-only disks, changes while reading."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import (
    AccessDeniedError,
    BucketMissingError,
    ConfigError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    SpanError,
    StoreError,
    ThrottledError,
)
from penstock.fetch import PlanItem
from penstock.store import local
from penstock.store.local import LocalStore
from penstock.store.records import RECORDS_FOLDER, FileRecords, StoredRecord, written_headers
from penstock.store.tree import Tree
from penstock.types import (
    AbortMultipart,
    ByteRange,
    CompleteMultipart,
    CopyPart,
    CreateMultipart,
    Get,
    Head,
    Landing,
    ListPage,
    PutPart,
    lasting_etag,
)
from store_contract.support import WatchingSink, submit


@pytest.fixture
def store(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with LocalStore(root) as store:
        yield store


PARTS = bytes(range(256)) * (3 << 12)


def done(store, operation):
    completion = submit(store, operation)[1].wait()
    if completion.error is not None:
        raise completion.error
    return completion.value


def keys(store, **options):
    return [info.key for info in store.list(**options)]


@pytest.mark.parametrize("key", ["a\0b", "s" * 256, ".penstock-0123.tmp", "a/.penstock-0123.tmp"])
def test_names_that_no_file_may_have_are_refused(store, key):
    """NUL, overlong segments and our own temporary names are refused before anything is touched."""
    for attempt in (store.stat, store.path, lambda key: store.write(key, b"")):
        with pytest.raises(ConfigError):
            attempt(key)


def test_names_that_collide_with_a_directory_are_refused(store):
    """A key cannot be a directory, nor run through a file; the message says which, and nothing is left behind."""
    store.write("a/b", b"x")
    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(StoreError, match=r"directory|file"):
            store.write(key, b"y")
    with pytest.raises(ObjectMissingError):
        store.read("a/b/c")
    store.delete(["a", "a/b/c"])
    assert sorted(os.listdir(store.root / "a")) == ["b"]
    assert keys(store) == ["a/b"]


@pytest.mark.parametrize(
    "write",
    [
        "store.write('a/k', b'new')",
        "store.copy('k', 'a/k')",
        "with store.writer('a/k', part_bytes=1 << 20) as file: file.write(bytes(3 << 20))",
    ],
)
def test_a_killed_write_leaves_nothing(store, write):
    """A process that is killed before its object is complete leaves no file, hidden or not."""
    store.write("k", b"old")
    code = (
        "import os, sys; from penstock.store.local import LocalStore; os.fsync = lambda fd: os.kill(os.getpid(), 9)\n"
        f"store = LocalStore(sys.argv[1])\n{write}"
    )
    done = subprocess.run([sys.executable, "-c", code, store.root], timeout=30)
    assert done.returncode == -9
    assert [path.name for path in store.root.rglob("*") if not path.is_dir()] == ["k"]


@pytest.mark.parametrize("can_link", [True, False], ids=["without-name", "hidden-name"])
def test_writes_and_failed_writes_leave_one_file(store, monkeypatch, can_link):
    """An object is one file with one link, and a write that is refused leaves nothing, on any file system."""
    monkeypatch.setattr(local, "_CAN_LINK", can_link)
    store.write("a/k", b"old")
    store.write("a/k", b"new")
    with pytest.raises(ObjectExistsError):
        store.write("a/k", b"other", if_absent=True)
    store.write("b/k", b"first", if_absent=True)
    with store.writer("c/k", part_bytes=1 << 20) as file:
        file.write(PARTS)
    found = {str(path.relative_to(store.root)): path for path in store.root.rglob("*") if not path.is_dir()}
    assert {name: (path.read_bytes(), path.stat().st_nlink) for name, path in found.items()} == {
        "a/k": (b"new", 1),
        "b/k": (b"first", 1),
        "c/k": (PARTS, 1),
    }


@pytest.mark.parametrize("can_link", [True, False], ids=["without-name", "hidden-name"])
def test_parts_in_any_order_are_joined_by_number(store, monkeypatch, can_link):
    """Parts that come out of order, twice or at once, or that the object leaves out, are none of the object's bytes."""
    monkeypatch.setattr(local, "_CAN_LINK", can_link)
    store.write("s", b"0123456789")

    upload_id = done(store, CreateMultipart("a/m"))
    with pytest.raises(SpanError):
        done(store, CopyPart("s", ByteRange(5, 11), "a/m", upload_id, 1))
    first = done(store, PutPart("a/m", upload_id, 1, b"not these"))
    three = done(store, PutPart("a/m", upload_id, 3, b"three"))
    done(store, PutPart("a/m", upload_id, 4, b"left out"))
    two = done(store, CopyPart("s", ByteRange(2, 5), "a/m", upload_id, 2))
    one = done(store, PutPart("a/m", upload_id, 1, b""))
    with pytest.raises(StoreError, match="not the one that was sent"):
        done(store, CompleteMultipart("a/m", upload_id, (first, two, three)))
    with pytest.raises(StoreError, match="no upload"):
        done(store, PutPart("a/other", upload_id, 1, b""))
    store.write("a/m", b"present")
    with pytest.raises(ObjectExistsError):
        done(store, CompleteMultipart("a/m", upload_id, (one, two, three), if_absent=True))
    done(store, CompleteMultipart("a/m", upload_id, (one, two, three)))
    assert bytes(store.read("a/m").data) == b"234three"
    with ThreadPoolExecutor(8) as threads:
        upload_id = done(store, CreateMultipart("a/m"))
        parts = list(
            threads.map(lambda n: done(store, PutPart("a/m", upload_id, n, b"%03d" % n * 1000)), range(1, 100))
        )
    with pytest.raises(ObjectExistsError):
        done(store, CompleteMultipart("a/m", upload_id, tuple(parts), if_absent=True))
    done(store, CompleteMultipart("a/m", upload_id, tuple(parts)))
    assert bytes(store.read("a/m").data) == b"".join(b"%03d" % n * 1000 for n in range(1, 100))
    done(store, CreateMultipart("b/m"))
    store.close()
    assert sorted(path.name for path in store.root.rglob("*")) == ["a", "m", "s"]


@pytest.mark.parametrize("ends", ["aborted", "completed"])
def test_a_part_of_an_upload_that_has_ended_is_written_nowhere(store, ends):
    """A part that found its upload just before another thread ended it is refused, whoever has its descriptor by then."""
    store.write("victim", b"untouched")
    upload_id = done(store, CreateMultipart("k"))
    part = done(store, PutPart("k", upload_id, 1, b"one"))
    upload = store._upload("k", upload_id)
    end = AbortMultipart("k", upload_id) if ends == "aborted" else CompleteMultipart("k", upload_id, (part,))
    done(store, end)
    others = [
        os.open(store.root / "victim", os.O_RDONLY) for _ in range(3)
    ]  # the lowest free numbers: that of the upload too
    try:
        with pytest.raises(StoreError) as caught, upload.appended(2, 4) as (fd, _):
            local.write_all(fd, memoryview(b"late"))
    finally:
        for fd in others:
            os.close(fd)
    assert caught.value.code == "NoSuchUpload"
    assert store.read("victim").data == b"untouched"


def test_while_an_upload_is_completed_nothing_else_is_done_with_it(store, monkeypatch):
    """A part, an abort or a second commit that comes meanwhile is refused, and the object has the parts that were named."""
    upload_id = done(store, CreateMultipart("k"))
    part = done(store, PutPart("k", upload_id, 1, b"one"))
    complete = CompleteMultipart("k", upload_id, (part,))
    late = [PutPart("k", upload_id, 2, b"late"), AbortMultipart("k", upload_id), complete]
    codes, sync = [], os.fsync

    def interrupted(fd):
        while late:
            error = submit(store, late.pop(0))[1].wait().error
            codes.append(error and error.code)
        sync(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    done(store, complete)
    assert codes == ["NoSuchUpload"] * 3
    assert store.read("k").data == b"one"


def test_an_upload_whose_commit_failed_goes_on(store):
    """It takes further parts, and becomes an object when the reason of the failure is gone."""
    store.write("k", b"present")
    upload_id = done(store, CreateMultipart("k"))
    one = done(store, PutPart("k", upload_id, 1, b"one"))
    with pytest.raises(ObjectExistsError):
        done(store, CompleteMultipart("k", upload_id, (one,), if_absent=True))
    two = done(store, PutPart("k", upload_id, 2, b"two"))
    store.delete("k")
    done(store, CompleteMultipart("k", upload_id, (one, two), if_absent=True))
    assert store.read("k").data == b"onetwo"


def test_many_uploads_leave_files_for_everybody_else(store):
    """An upload without a part holds no descriptor, and those that are begun are at most a quarter of the files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    store.write("other", b"x")
    open_count = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        upload_ids = [done(store, CreateMultipart("k")) for _ in range(256)]
        with pytest.raises(ThrottledError, match="256 uploads have been begun") as caught:
            done(store, CreateMultipart("k"))
        assert (caught.value.status, caught.value.code) == (503, "SlowDown")
        assert len(os.listdir("/proc/self/fd")) == open_count
        for upload_id in upload_ids:
            done(store, PutPart("k", upload_id, 1, b"part"))
        assert len(os.listdir("/proc/self/fd")) == open_count + 256
        assert store.read("other").data == b"x"
        done(store, AbortMultipart("k", upload_ids[0]))
        done(store, CreateMultipart("k"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_uploads_that_nobody_uses_are_dropped(store, monkeypatch):
    """When another one begins, an upload is dropped whose last part came a day ago, but none that is younger."""
    monkeypatch.setattr(local, "UPLOAD_IDLE_S_MAX", 3600.0)
    old, young, used = (done(store, CreateMultipart("a/k")) for _ in range(3))
    for upload_id in (old, young, used):
        store._upload("a/k", upload_id).used_s -= 3601 if upload_id != young else 3000
    done(store, PutPart("a/k", used, 1, b"part"))
    open_count = len(os.listdir("/proc/self/fd"))
    store._upload("a/k", used).used_s -= 3000
    done(store, CreateMultipart("a/k"))
    with pytest.raises(StoreError, match="no upload"):
        done(store, PutPart("a/k", old, 1, b"part"))
    store._upload("a/k", used).used_s -= 601
    done(store, CreateMultipart("a/k"))
    assert len(os.listdir("/proc/self/fd")) == open_count - 1
    done(store, PutPart("a/k", young, 1, b"part"))


def test_a_missing_root_is_named(tmp_path):
    """Reading below a directory that is not there is BucketMissingError; writing makes it."""
    with LocalStore(tmp_path / "none") as store:
        with pytest.raises(BucketMissingError, match=r"the directory .*none does not exist.*Hint: check the path"):
            store.read("k")
        with pytest.raises(BucketMissingError):
            list(store.list())
        store.write("a/k", b"x")
        assert keys(store) == ["a/k"]


def test_links_are_followed_and_loops_are_not(store, tmp_path):
    """Links to files and directories are listed and read; a loop ends, a link to nowhere is no object."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "k").write_bytes(b"elsewhere")
    store.write("d/here", b"x")
    (store.root / "d" / "link").symlink_to(tmp_path / "other")
    (store.root / "d" / "loop").symlink_to(store.root)
    (store.root / "d" / "self").symlink_to(store.root / "d")
    (store.root / "dangling").symlink_to(tmp_path / "nowhere")
    (store.root / "circle").symlink_to("circle")
    assert keys(store) == ["d/here", "d/link/k"]
    assert store.read("d/link/k").data == b"elsewhere"


def test_writing_replaces_a_link_not_its_target(store, tmp_path):
    """An object's new bytes never go where a link leads."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (store.root / "k").symlink_to(outside)
    store.write("k", b"new")
    assert outside.read_bytes() == b"mine"
    assert store.read("k").data == b"new"


def test_only_regular_files_are_objects(store):
    """A FIFO does not hang a reader, and neither it nor empty directories are listed."""
    os.mkfifo(store.root / "fifo")
    (store.root / "empty" / "below").mkdir(parents=True)
    with pytest.raises(ObjectMissingError):
        store.read("fifo")
    with pytest.raises(StoreError, match="not a regular file"):
        store.write("fifo", b"x")
    assert (store.root / "fifo").is_fifo()
    assert keys(store) == []
    assert keys(store, recursive=False) == []


def test_what_a_killed_process_left_is_not_listed(store):
    """Hidden temporary files and uploads are no objects, at any depth."""
    store.write("a/k", b"x")
    (store.root / "a" / ".penstock-00ff.tmp").write_bytes(b"half")
    (store.root / ".penstock-00aa.tmp").mkdir()
    (store.root / ".penstock-00aa.tmp" / "1").write_bytes(b"part")  # earlier versions wrote parts there
    assert keys(store) == ["a/k"]
    assert keys(store, recursive=False) == ["a/"]


def test_a_name_that_is_not_utf8_is_an_error(store):
    """A file that no key can name is not left out silently."""
    store.write("k", b"x")
    os.close(os.open(os.fsencode(store.root) + b"/\xff", os.O_CREAT))
    with pytest.raises(StoreError, match="UTF-8"):
        keys(store)


def overwrite(path, data):
    """Write other bytes of the same length in place, and give the file its former modification time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # the clock of the file system ticks every few milliseconds
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_a_file_overwritten_in_place_with_its_former_time_is_another_version(store):
    """Size, modification time and inode are the same: an open file and a pinned read still notice it."""
    store.write("k", b"a" * 200_000)
    before = store.stat("k")
    with store.open("k") as file:
        file.read(10)
        overwrite(store.root / "k", b"b" * 200_000)
        with pytest.raises(ObjectChangedError):
            file.read()
    with pytest.raises(ObjectChangedError):
        next(store.read_many([PlanItem("k", etag=before.etag)]))
    assert store.stat("k").etag != before.etag


def test_a_pin_that_lasts_survives_a_change_of_the_status(store):
    """Links and permissions change the ETag; a pin without the time of the status matches, and is answered as it was asked."""
    store.write("k", b"a" * 1000, if_absent=True)
    etag = store.stat("k").etag
    pin = lasting_etag(etag)
    while store.stat("k").etag == etag:
        (store.root / "k").chmod(0o600)
    assert next(store.read_many([PlanItem("k", etag=pin)])).etag == pin
    assert lasting_etag(store.stat("k").etag) == pin
    os.utime(store.root / "k", (1, 1))
    with pytest.raises(ObjectChangedError):
        next(store.read_many([PlanItem("k", etag=pin)]))


@pytest.mark.parametrize(
    "etag", [None, '"6b0b2092-c36"', '"d41d8cd98f00b204e9800998ecf8427e-12"', '"a-b-c"', '"1-2-3-c4 "']
)
def test_etags_of_other_stores_are_kept_whole(etag: str | None) -> None:
    """nginx's ``"mtime-size"`` of a file of 0xc36 bytes ends like a local file's, and is all there is to compare."""
    assert lasting_etag(etag) == etag


@pytest.mark.parametrize("if_absent", [True, False])
def test_a_write_tells_the_version_that_the_file_keeps(store, if_absent):
    """What a write returns is what ``stat`` and listings say afterwards."""
    etag = store.write("k", b"a", if_absent=if_absent).etag
    assert etag == store.stat("k").etag == next(store.list()).etag


@pytest.mark.parametrize("change", ["rewrite", "truncate", "grow"])
def test_a_change_while_reading_is_never_a_mix(store, change):
    """A file that changes between the answer's head and its end is ObjectChangedError."""
    path = store.root / "k"
    store.write("k", b"a" * 1000)
    os.utime(path, (1, 1))

    class ChangingSink(WatchingSink):
        def head(self, info, span):
            with open(path, "r+b") as file:
                if change == "truncate":
                    file.truncate(10)
                else:
                    file.seek(0, os.SEEK_SET if change == "rewrite" else os.SEEK_END)
                    file.write(b"b" * 500)
            return super().head(info, span)

    _, sink = submit(store, Get("k"), ChangingSink(Landing(bytearray(1000), 0, 1000)))
    assert isinstance(sink.wait().error, ObjectChangedError)


def test_replacing_while_reading_gives_the_old_object(store):
    """A rename does not disturb who has the old file open: the bytes are of one version."""
    store.write("k", b"old")
    etag = store.stat("k").etag

    class ReplacingSink(WatchingSink):
        def head(self, info, span):
            os.replace(store.root / "new", store.root / "k")
            return super().head(info, span)

    store.write("new", b"new!")
    completion = submit(store, Get("k"), ReplacingSink())[1].wait()
    assert (completion.error, bytes(completion.body), completion.info.etag) == (None, b"old", etag)
    assert isinstance(submit(store, Get("k", None, etag))[1].wait().error, ObjectChangedError)


@pytest.fixture
def small_files_only():
    """Files may not grow past 64 KiB, as on a full disk; Python ignores the signal, so writes fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files_only")
def test_a_full_disk_leaves_nothing_behind(store):
    """A write that does not fit is a typed error; what was there stays, and no temporary file is left."""
    store.write("k", b"before")
    with pytest.raises(StoreError, match="too large"):
        store.write("k", bytes(100_000))
    with pytest.raises(StoreError, match="too large"):
        store.write("new/folder/k", bytes(100_000))
    with pytest.raises(StoreError, match="too large"):
        with store.writer("w", part_bytes=80_000) as writer:
            writer.write(bytes(300_000))
    assert os.listdir(store.root) == ["k"]
    assert store.read("k").data == b"before"


def test_a_read_only_place_is_access_denied():
    """Where the system forbids writing, the error is AccessDeniedError and names the object."""
    with LocalStore("/sys/kernel") as store, pytest.raises(AccessDeniedError, match="penstock-test"):
        store.write("penstock-test/k", b"x")


@pytest.mark.parametrize(("keys_max", "scans_count"), [(5, 2), (1000, 1)])
def test_a_flat_directory_is_not_read_for_each_page(store, monkeypatch, keys_max, scans_count):
    """Between pages the walk stands still. Only a small first page does not sort the whole directory."""
    for index in range(50):
        (store.root / f"{index:03}").touch()
    scans = []
    scandir = os.scandir
    monkeypatch.setattr("penstock.store.tree.os.scandir", lambda path: scans.append(path) or scandir(path))
    from penstock.store.listing import list_objects

    assert len(list(list_objects(store, "", keys_max=keys_max))) == 50
    assert len(scans) == scans_count


@pytest.mark.server
def test_many_listings_hold_little(store):
    """Listings that begin everywhere and never go on hold a bounded number of names, and the last can be continued."""
    for index in range(3000):
        (store.root / f"{index:04}-{'x' * 60}").touch()
    tree = Tree(store.root)
    tree._walks.bytes_max = 1 << 20
    for index in range(60):
        few = tree.page(ListPage(start_after=f"{index:04}", keys_max=1))
        assert tree.held_bytes < 1000 * (index + 1)
        assert [info.key[:4] for info in few.objects] == [f"{index:04}"]
    for index in range(60):
        page = tree.page(ListPage(start_after=f"{index:04}"))
        assert tree.held_bytes <= 1 << 20
    following = tree.page(ListPage(token=page.next_token))
    assert [int(info.key[:4]) for info in page.objects + following.objects] == list(range(59, 2059))


@pytest.mark.parametrize("keys_max", [1, 2, 7])
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_small_pages_give_what_one_page_gives(store, keys_max, delimiter):
    """However few keys a page has, the pages together have the same keys, and any of them can be read anew."""
    for key in ("a", "b/1", "b/2/x", "b!", "c/d/e/f", "c/d/e0", "d", "e/1", "e.", "f"):
        store.write(key, b"")
    (store.root / "empty" / "er").mkdir(parents=True)
    whole = Tree(store.root).page(ListPage(delimiter=delimiter))
    found, token = [], None
    while True:
        tree = Tree(store.root) if len(found) % 3 else store._tree
        page = tree.page(ListPage(delimiter=delimiter, token=token, keys_max=keys_max))
        found += sorted([*(info.key for info in page.objects), *page.prefixes])
        token = page.next_token
        if token is None:
            break
    assert found == sorted([*(info.key for info in whole.objects), *whole.prefixes])


def test_nothing_is_left(nothing_left, tmp_path):
    """Closing ends the threads, and every descriptor is closed, also after errors."""
    with nothing_left(), LocalStore(tmp_path) as store:
        store.write("k", b"x")
        list(store.read_many(["k"] * 50))
        with pytest.raises(ObjectMissingError):
            store.read("none")


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def described(store, key="k"):
    info = store.stat(key)
    return written_headers(info), info.tags


@pytest.mark.parametrize("has_attributes", [True, False], ids=["attributes", "sidecars"])
@pytest.mark.parametrize("length", [5, 10_000], ids=["short", "long"])
def test_a_record_goes_with_its_file(store, has_attributes, length):
    """Headers and tags of any length are there as long as the file is, and leave nothing when it is replaced or removed."""
    store.records = FileRecords(store.root / RECORDS_FOLDER, has_attributes=has_attributes)
    kept = {"Content-Type": "text/plain", "x-amz-meta-a": "b" * length}
    store.write("a/k", b"one", headers=kept, tags={"t": "v"})
    assert described(store, "a/k") == (kept, {"t": "v"})
    assert keys(store) == ["a/k"]
    store.copy("a/k", "copy")
    assert described(store, "copy") == (kept, {"t": "v"})
    store.write("a/k", b"two", headers={"x-amz-meta-a": "c" * length})
    assert described(store, "a/k") == ({"x-amz-meta-a": "c" * length}, {})
    store.delete(["a/k", "copy"])
    assert [path for path in store.root.rglob("*") if path.is_file()] == []


def test_a_record_that_cannot_be_removed_fails_no_write(store):
    """When the record of the version before is removed, the new one is visible already."""
    store.write("k", b"old")
    status = (store.root / "k").stat()
    store.records._path(status).mkdir(parents=True)  # in the place of the record, as nobody can remove a file there
    store.write("k", b"new")
    assert store.read("k").data == b"new"


def test_a_file_that_another_program_changes_has_no_record(store):
    """Headers of bytes that are gone are not told."""
    store.write("k", b"one", headers={"Content-Type": "text/plain"})
    (store.root / "k").write_bytes(b"another")
    assert described(store) == ({}, {})


def test_records_of_the_gateway_are_those_of_the_store(store):
    """A checksum of the whole object is told, and one of its parts is not."""
    for kind, told in (("FULL_OBJECT", {"crc32c": "AAAAAA=="}), ("COMPOSITE", {})):
        with (store.root / "k").open("wb") as file:
            file.write(b"data")
            file.flush()
            record = StoredRecord(etag="x", checksums={"crc32c": "AAAAAA=="}, checksum_type=kind)
            store.records.save(file.fileno(), record)
        assert store.stat("k").checksums == told


def test_reading_looks_for_no_record(store, monkeypatch):
    """Neither a read nor the question whether a version is still there costs a system call for the record."""
    store.write("k", b"data" * 10, headers={"Content-Type": "text/plain"})
    etag = store.stat("k").etag
    monkeypatch.setattr(store.records, "load", None)
    assert store.read("k").data == b"data" * 10
    assert store.open("k").read() == b"data" * 10
    submit(store, Head("k", etag, 40))[1].wait()


CONDITIONAL = """
import sys
from penstock.errors import ObjectChangedError
from penstock.store.local import LocalStore
store, written = LocalStore(sys.argv[1]), 0
while written < 50:
    found = store.stat("counter")
    count = int(bytes(store.read("counter").data))
    try:
        store.write("counter", b"%d" % (count + 1), if_match=found.etag)
    except ObjectChangedError:
        continue
    written += 1
"""


def test_conditional_writes_of_several_processes_lose_nothing(store):
    """A counter that three processes raise 50 times each, each time by one, ends at 150."""
    store.write("counter", b"0")
    processes = [subprocess.Popen([sys.executable, "-c", CONDITIONAL, store.root]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert store.read("counter").data == b"150"


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("store.write('a/k', b'plain')", b"plain"),
        ("store.delete('a/k')", None),
        ("store.delete('a/k'), store.write('a/k', b'again', if_absent=True)", b"again"),
    ],
)
def test_a_change_during_a_conditional_write_comes_before_or_after_it(store, monkeypatch, change, left):
    """What is written or removed after the versions were compared waits until the new version is there, and is not lost."""
    etag = store.write("a/k", b"old").etag
    check, changes = local._check_version, []

    def interrupted(found, if_match):
        check(found, if_match)
        changes.append(threading.Thread(target=eval, args=(change, {"store": store})))
        changes[0].start()
        changes[0].join(0.2)  # it ends before the rename only if it does not wait for that

    with monkeypatch.context() as patch:
        patch.setattr(local, "_check_version", interrupted)
        store.write("a/k", b"conditional", if_match=etag)
        changes[0].join()
    assert (bytes(store.read("a/k").data) if "a/k" in keys(store) else None) == left


def test_where_there_are_no_locks_only_writes_of_one_version_fail(store, monkeypatch):
    """A file system without locks takes all other writes and deletions: nobody can hold a lock there."""
    etag = store.write("a/k", b"old").etag

    def flock(fd, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match="No locks available"):
        store.write("a/k", b"new", if_match=etag)
    assert store.read("a/k").data == b"old"
    store.write("a/k", b"new")
    store.delete("a/k")
    store.write("a/k", b"newer", if_absent=True)
    assert store.read("a/k").data == b"newer"


def test_a_write_that_is_killed_between_lock_and_rename_blocks_nobody(store):
    """The lock of a killed process is gone with it, and the version before is still there."""
    store.write("k", b"old")
    code = (
        "import os, sys, pathlib; from penstock.store.local import LocalStore\n"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "store = LocalStore(sys.argv[1])\nstore.write('k', b'new', if_match=store.stat('k').etag, headers={'Expires': '0'})"
    )
    assert subprocess.run([sys.executable, "-c", code, store.root], timeout=30).returncode == -9
    assert store.read("k").data == b"old"
    store.write("k", b"newer", if_match=store.stat("k").etag)
    assert store.read("k").data == b"newer"
