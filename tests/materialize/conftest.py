"""Fixtures of most tests of materializations."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.materialize.lake import Table


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'lake'}"


@pytest.fixture
def table(lake: str) -> Iterator[Table]:
    """A table in the lake, with changes at several times."""
    table = Table(f"{lake}/shop", random.Random(5))
    table.change()
    yield table
    table.client.close()
