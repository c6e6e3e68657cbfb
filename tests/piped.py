"""Objects for the pipes of a channel: TFRecords, and tar archives of samples with two members."""

from __future__ import annotations

import io
import tarfile

from penstock.formats.writers import TFRecordWriter


def tfrecords(values: list[bytes]) -> bytes:
    file = io.BytesIO()
    writer = TFRecordWriter(file.write)
    for value in values:
        writer.add({"record": value})
    writer.finish()
    return file.getvalue()


def tar(names: list[str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            for extension in ("jpg", "cls"):
                member = tarfile.TarInfo(f"{name}.{extension}")
                data = f"{name} {extension}".encode()
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()
