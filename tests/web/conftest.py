from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing.clocks import ManualClock
from penstock.web import LakeView, Served, serve
from tests.web.shop import Shop


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def shop(tmp_path: Path, clock: ManualClock) -> Iterator[Shop]:
    shop = Shop(f"memory:{tmp_path.name}", clock)
    yield shop
    shop.close()


@pytest.fixture
def view(shop: Shop) -> Iterator[LakeView]:
    view = shop.view()
    yield view
    view.close()


@pytest.fixture
def served(view: LakeView) -> Iterator[Served]:
    with serve(view, ":0", token=None) as served:
        yield served
