from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.stores import KINDS, Opener, opener_of

from penstock.durable.blob import Blob


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Yield a function that opens another handle on the store; all handles close at teardown."""
    opened: list[Blob] = []
    open_one = opener_of(request.param, request, tmp_path)

    def opening() -> Blob:
        opened.append(open_one())
        return opened[-1]

    yield opening
    for blob in opened:
        blob.close()
