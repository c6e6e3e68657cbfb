"""``make mutations`` can run: each of its rows still fits the code."""

from __future__ import annotations

import pytest

from mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.contract)
def test_a_mutation_fits_the_code(mutation: Mutation) -> None:
    """The text is in its file exactly once, the function that it names is there, and the tests that have to notice it exist."""
    code = (ROOT / "src/penstock" / mutation.path).read_text()
    assert code.count(mutation.old) == 1
    assert f"def {mutation.function.rpartition('.')[2]}(" in code
    for test in mutation.tests:
        name, *parts = test.split("::")
        text = (ROOT / "tests" / name).read_text()
        assert [part for part in parts if part.partition("[")[0] not in text] == []
