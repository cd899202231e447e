"""Data that must stay readable: history until Acknowledged, and contents for a rewrite."""

from pathlib import Path

import pytest

from penstock import persist
from penstock.errors import IndeterminateError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.checkpoint import Checkpoint, ResourceProgress
from penstock.materialize.inputs import hold_owner
from penstock.materialize.intervals import BoundResource, RewriteInterval, missing_interval
from tests.materialize.lake import Endpoint, Table, bring, materializing, once


def held_since(lake: str) -> int:
    """Return the since of the durable hold of the materialization on the table."""
    with persist.open(f"{lake}/shop") as client:
        return client.hold(hold_owner("local")).sinces()["shop.t"]


def test_hold_stays_below_unacknowledged_commit(lake: str, table: Table, tmp_path: Path) -> None:
    endpoint = Endpoint("staged-files", tmp_path)
    bring(lake, endpoint, tmp_path)
    assert held_since(lake) == 19
    table.change()
    # The first process ends between commit and Acknowledge, the second before it acknowledges.
    for step in (Failpoint.RECOVERY_DONE, Failpoint.PLAN_DONE):
        with (
            materializing(lake, endpoint, tmp_path) as crashed,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(crashed)
        assert held_since(lake) == 19, step
    bring(lake, endpoint, tmp_path)
    assert held_since(lake) == 39
    assert endpoint.rows() == table.contents()


@pytest.mark.parametrize(("frontier", "before"), [(20, None), (21, 20), (22, 21)])
def test_backfill_compares_with_earlier_contents_only_from_since(
    frontier: int, before: int | None
) -> None:
    bound = BoundResource("t", "shop.t", "shop/1", backfill=1, since=20, upper=60)
    opened = Checkpoint("local", {"t": ResourceProgress("shop/1", 0, frontier)})
    assert missing_interval(bound, opened, 50) == RewriteInterval(before, 49)


@pytest.mark.parametrize(("frontier", "before"), [(20, None), (21, 20)])
def test_rewrite_for_new_layout_compares_with_earlier_contents_only_from_since(
    frontier: int, before: int | None
) -> None:
    bound = BoundResource("t", "shop.t", "shop/1", backfill=0, since=20, upper=60, layout="new")
    opened = Checkpoint("local", {"t": ResourceProgress("shop/1", 0, frontier, layout="old")})
    assert missing_interval(bound, opened, 50) == RewriteInterval(before, 49)
