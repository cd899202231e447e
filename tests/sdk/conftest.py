"""Fixtures that serve the toy connector."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.materialize import ConnectorConnection, connect
from penstock.sdk import serve
from tests.sdk.toy import Toy


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def connection(toy: Toy, tmp_path: Path) -> Iterator[ConnectorConnection]:
    with serve(toy, f"unix:{tmp_path}/toy.sock") as server, connect(server.address) as connection:
        yield connection
