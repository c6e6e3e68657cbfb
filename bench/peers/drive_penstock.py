"""penstock, as it comes: ``read_many`` of keys, whatever their size."""

from __future__ import annotations

from _driver import ACCESS_KEY, REGION, SECRET_KEY, Take, serve

import penstock


class Penstock:
    packages = ("penstock-data", "pycurl")

    def __init__(
        self,
        *,
        url: str,
        bucket: str,
        ca: str | None,
        fetch: dict[str, int] | None = None,
        threads_count: int | None = None,
    ) -> None:
        self.store = penstock.connect(
            f"s3://{bucket}",
            endpoint_url=url,
            region=REGION,
            credentials=penstock.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY),
            transport=penstock.TransportConfig(ca_bundle=ca, threads_count=threads_count),
            fetch=penstock.FetchConfig(**(fetch or {})),
        )

    def read(self, keys: list[str], _size_bytes: int, in_order: bool, take: Take) -> None:
        for blob in self.store.read_many(keys, ordered=in_order):
            take(blob.request_index, blob.data)
            del blob

    def list(self) -> list[str]:
        return [info.key for info in self.store.list()]


if __name__ == "__main__":
    serve(Penstock)
