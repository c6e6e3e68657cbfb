"""obstore (Rust object_store): whole small objects in threads, large ones as ranges in threads, in order."""

from __future__ import annotations

from pathlib import Path

import _driver
import obstore
from obstore.store import S3Store


class Obstore:
    packages = ("obstore",)

    def __init__(
        self,
        *,
        url: str,
        bucket: str,
        ca: str | None,
        threads: int = 64,
        threads_large: int = 8,
        part_bytes: int = 8 << 20,
    ) -> None:
        trust = {"root_certificate": Path(ca).read_text()} if ca else {}
        self.store = S3Store(
            bucket,
            endpoint=url,
            region=_driver.REGION,
            access_key_id=_driver.ACCESS_KEY,
            secret_access_key=_driver.SECRET_KEY,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, **trust},
        )
        self.threads, self.threads_large, self.part_bytes = threads, threads_large, part_bytes

    def _fetch(self, key: str) -> memoryview:
        return memoryview(obstore.get(self.store, key).bytes())

    def _fetch_part(self, part: tuple[str, int, int]) -> memoryview:
        key, start, end = part
        return memoryview(obstore.get_range(self.store, key, start=start, end=end))

    def read(self, keys: list[str], size_bytes: int, in_order: bool, take: _driver.Take) -> None:
        if not in_order:
            _driver.in_threads(self._fetch, keys, self.threads, take)
        elif size_bytes > self.part_bytes:
            self._read_parts(keys, size_bytes, take)
        else:
            _driver.in_order(self._fetch, keys, self.threads, take)

    def _read_parts(self, keys: list[str], size_bytes: int, take: _driver.Take) -> None:
        """Objects as lists of their parts: the bytes are not joined, which favours obstore."""
        plan = _driver.parts(keys, size_bytes, self.part_bytes)
        pieces: list[memoryview] = []

        def take_part(index: int, body: memoryview) -> None:
            pieces.append(body)
            if plan[index][2] == size_bytes:
                take(index // (len(plan) // len(keys)), pieces.copy())
                pieces.clear()

        _driver.in_order(self._fetch_part, plan, self.threads_large, take_part)

    def list(self) -> list[str]:
        return [item["path"] for page in obstore.list(self.store, chunk_size=1000) for item in page]


if __name__ == "__main__":
    _driver.serve(Obstore)
