"""Transactions that crash at each step: the endpoint has each change once."""

import random
from pathlib import Path

import pytest

from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, armed
from tests.materialize.lake import Endpoint, Table, materializing, once

STEPS = (
    Failpoint.PLAN_DONE,
    Failpoint.STORE_DONE,
    Failpoint.RECOVERY_DONE,
    Failpoint.ACKNOWLEDGE_DONE,
)


@pytest.mark.parametrize("connector", ["sqlite", "plain-files", "staged-files"])
@pytest.mark.parametrize("shards", [1, 3])
def test_endpoint_equals_collection_after_crash_at_each_step(
    tmp_path: Path, connector: str, shards: int
) -> None:
    lake, endpoint = f"file:{tmp_path / 'lake'}", Endpoint(connector, tmp_path)
    table = Table(f"{lake}/shop", random.Random(7))
    table.change()
    with materializing(lake, endpoint, tmp_path, shards=shards) as materialization:
        once(materialization)
    assert endpoint.rows() == table.contents()
    for step in STEPS:
        table.change()
        with (
            materializing(lake, endpoint, tmp_path, shards=shards) as materialization,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(materialization)
        # The planned transaction must be finished before the changes after the crash.
        table.change()
        with materializing(lake, endpoint, tmp_path, shards=shards) as materialization:
            once(materialization)
        assert endpoint.rows() == table.contents(), step
    table.client.close()
