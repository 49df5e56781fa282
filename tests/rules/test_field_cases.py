"""docs/field-cases.md names tests that are there."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs/field-cases.md").read_text().splitlines() if line.startswith("| DX-")]


def named_tests(row: str) -> list[str]:
    return re.findall(r"`(tests/[^`]+)`", row)


def test_every_case_has_one_row() -> None:
    cases = [row.split("|")[1].strip() for row in ROWS]
    assert len(cases) > 0
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test_or_says_why_not(row: str) -> None:
    names = named_tests(row)
    assert names or "Not yet:" in row
    for name in names:
        path, _, pattern = name.partition("::")
        file = ROOT / path
        assert file.is_file(), f"{path} isn't there"
        functions = [node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        assert not pattern or fnmatch.filter(functions, pattern), f"{path} has no test like {pattern}"
