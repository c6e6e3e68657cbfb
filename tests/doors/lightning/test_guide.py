from __future__ import annotations

from pathlib import Path

import pytest

from pages import run_page


@pytest.mark.parametrize("page", ["docs/guides/lightning.md"])
def test_the_page_runs(tmp_path: Path, page: str) -> None:
    """What the page shows as runnable runs, in order, on shards of pictures and of records."""
    run_page(page, "lightning", tmp_path)
