"""HDF5 files in object storage, read row by row through `penstock.open`: no download, only the chunks that are needed.

Run it as `python hdf5.py s3://bucket/points.h5`: it writes a small file there and reads it back in random order. Needs:
penstock's extra `torch`, h5py
"""

import sys
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import torch

import penstock as ps

ROWS = 4096


def write(url: str) -> None:
    with h5py.File.in_memory() as file:
        values = np.arange(ROWS * 64, dtype=np.float32).reshape(ROWS, 64)
        file.create_dataset("points", data=values, chunks=(256, 64))
        file.flush()
        with ps.open(url, "wb") as target:
            target.write(file.id.get_file_image())


class Points(torch.utils.data.Dataset[Any]):
    """Rows by number. The file is opened where it is read: once in each worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._points: Any = None

    def __len__(self) -> int:
        return ROWS

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """A batch: HDF5 reads ascending rows in one go."""
        if self._points is None:
            self._points = h5py.File(ps.open(self.url))["points"]
        rows, places = np.unique(indices, return_inverse=True)
        return list(torch.from_numpy(self._points[rows])[places])


def main() -> None:
    url = sys.argv[1]
    write(url)
    batches = torch.utils.data.DataLoader(Points(url), batch_size=128, shuffle=True, num_workers=2)
    seen = torch.cat([batch[:, 0] for batch in batches])
    print(f"{len(seen)} rows, each once: {bool((seen.sort().values == torch.arange(ROWS) * 64).all())}")


if __name__ == "__main__":
    main()
