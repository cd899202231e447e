"""Fence vectors of tests/vectors/flow.json, in every SQL endpoint."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import Fenced, PenstockError
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import START_FROM_ZERO
from penstock.sdk.sql.fence import (
    Fence,
    commit_fence,
    create_checkpoints,
    install_fence,
    reset_fences,
)
from penstock.sdk.sql.session import Session
from tests.connectors.connector_client import Sql

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"].startswith("fence_")
}
INSTALLS = {name: case for name, case in CASES.items() if case["kind"] == "fence_install"}
NAME = "the/materialization"
LOWER, UPPER = WHOLE.split()


def in_order(row: dict[str, Any] | list[Any]) -> tuple[Any, ...]:
    if isinstance(row, list):
        return tuple(row)
    columns = ("materialization", "key_begin", "key_end", "fence", "checkpoint")
    return tuple(row[each] for each in columns)


class Checkpoints:
    """Checkpoint table and the operations on it."""

    def __init__(self, sql: Sql, session: Session) -> None:
        self.session, self.path, self.dialect = session, sql.checkpoints, sql.connector.dialect
        session.run(create_checkpoints(self.dialect, self.path))

    def put(self, rows: list[Any]) -> None:
        for row in rows:
            self.session.run(
                f"INSERT INTO {self.dialect.quoted_path(self.path)} VALUES (?, ?, ?, ?, ?)",
                in_order(row),
            )

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.session.query(f"SELECT * FROM {self.dialect.quoted_path(self.path)}"))

    def install(self, key_range: KeyRange, name: str = NAME) -> Fence:
        with self.session.transaction():
            return install_fence(self.session, self.dialect, name, key_range, self.path)

    def commit(self, fence: Fence, checkpoint: bytes) -> None:
        with self.session.transaction():
            commit_fence(self.session, self.dialect, fence, checkpoint, self.path)


@pytest.mark.parametrize("case", INSTALLS.values(), ids=INSTALLS.keys())
def test_install_fences_overlapping_ranges_and_inherits_covering_checkpoint(
    sql: Sql, case: Any
) -> None:
    given, expected = case["input"], case["expect"]
    opened = given["open"]
    key_range = KeyRange(opened["key_begin"], opened["key_end"])
    with sql.session() as session:
        table = Checkpoints(sql, session)
        table.put(given.get("table_rows") or given.get("rows_before_open") or [])
        held = table.install(key_range, opened.get("materialization", NAME))

        assert held.fence == expected["held_fence"]
        assert base64.b64encode(held.checkpoint).decode() == expected["opened_checkpoint_b64"]
        before = table.rows()
        assert before == sorted(in_order(row) for row in expected["rows_after"])

        table.commit(held, b"then")
        changed = [old[1:3] for old, new in zip(before, table.rows(), strict=True) if old != new]
        assert changed == [(key_range.begin, key_range.end)]


def test_fence_06_commit_of_zombie_raises_fenced_and_changes_nothing(sql: Sql) -> None:
    assert CASES["fence-06"]["kind"] == "fence_commit"
    with sql.session() as session:
        table = Checkpoints(sql, session)
        zombie, newer = table.install(WHOLE), table.install(WHOLE)
        assert (zombie.fence, newer.fence) == (1, 2)
        before = table.rows()
        with pytest.raises(Fenced, match="is fenced"):
            table.commit(zombie, b"zombie")
        assert table.rows() == before
        table.commit(newer, b"newer")


def test_fence_07_install_of_child_range_fences_parent_and_not_sibling(sql: Sql) -> None:
    assert CASES["fence-07"]["kind"] == "fence_commit"
    with sql.session() as session:
        table = Checkpoints(sql, session)
        parent, lower = table.install(WHOLE), table.install(LOWER)
        with pytest.raises(Fenced):
            table.commit(parent, b"zombie")
        table.install(UPPER)
        table.commit(lower, b"lower")


def test_fence_08_join_ignores_checkpoint_from_before_the_split(sql: Sql) -> None:
    assert CASES["fence-08"]["kind"] == "fence_join_hazard"
    with sql.session() as session:
        table = Checkpoints(sql, session)
        table.commit(table.install(WHOLE), b"before")
        for part in (LOWER, UPPER):
            held = table.install(part)
            assert held.checkpoint == b"before"
            table.commit(held, b"after")
        joined = table.install(WHOLE)
        assert joined.checkpoint == b""
        assert len(table.rows()) == 1
        table.commit(joined, b"joined")
        assert table.install(WHOLE).checkpoint == b"joined"


def test_partial_join_ignores_checkpoint_from_before_the_split(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        table.commit(table.install(WHOLE), b"before")
        quarters = [*LOWER.split(), *UPPER.split()]
        for held in [table.install(part) for part in quarters]:
            table.commit(held, b"after")
        halves = {part: table.install(part) for part in (LOWER, UPPER)}
        assert [fence.checkpoint for fence in halves.values()] == [b"", b""]
        # A second install without a commit in between inherits nothing either.
        again = table.install(LOWER)
        assert again.checkpoint == b""
        assert len(table.rows()) == 3
        table.commit(again, b"lower")
        assert table.install(quarters[0]).checkpoint == b"lower"
        table.commit(halves[UPPER], b"upper")
        assert table.install(UPPER).checkpoint == b"upper"


def test_join_of_ranges_that_no_row_covers_replaces_their_rows(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        parts = [table.install(part) for part in (LOWER, UPPER)]
        for held in parts:
            table.commit(held, b"part")
        joined = table.install(WHOLE)
        assert joined.checkpoint == b""
        assert table.rows() == [(NAME, WHOLE.begin, WHOLE.end, joined.fence, "")]
        table.commit(joined, b"joined")
        # The rows of the parts are deleted: every later stream inherits the checkpoint.
        assert table.install(WHOLE).checkpoint == b"joined"
        assert table.install(UPPER).checkpoint == b"joined"
        for held in parts:
            with pytest.raises(Fenced):
                table.commit(held, b"zombie")


def test_partially_overlapping_range_starts_empty_and_keeps_the_other_row(
    sql: Sql,
) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        old = table.install(KeyRange(0, 5))
        table.commit(old, b"old")
        held = table.install(KeyRange(3, 8))
        assert (held.fence, held.checkpoint) == (2, b"")
        text = base64.b64encode(b"old").decode()
        assert table.rows() == [(NAME, 0, 5, 2, text), (NAME, 3, 8, 2, "")]
        with pytest.raises(Fenced):
            table.commit(old, b"zombie")
        # The first row still covers keys that were written.
        assert table.install(KeyRange(6, 7)).checkpoint == b""


def test_range_with_gap_in_its_parts_inherits_covering_checkpoint(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        table.commit(table.install(WHOLE), b"before")
        first, second = LOWER.split()
        gap = KeyRange(second.begin + 1, second.end)
        for held in [table.install(part) for part in (first, gap)]:
            table.commit(held, b"after")
        assert table.install(LOWER).checkpoint == b"before"
        assert len(table.rows()) == 4


def test_zombie_across_join_and_split_cannot_commit(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        for part in (LOWER, UPPER):
            table.install(part)
        zombie = table.install(LOWER)
        table.install(LOWER)
        table.commit(table.install(WHOLE), b"whole")
        for _ in range(4):
            table.install(LOWER)
            with pytest.raises(Fenced):
                table.commit(zombie, b"zombie")


def test_install_and_forget_leave_other_materializations_alone(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        other = table.install(WHOLE, "other")
        table.commit(other, b"other")
        held = table.install(LOWER)
        assert (held.materialization, held.key_range, held.fence) == (NAME, LOWER, 1)
        table.commit(held, b"some")
        reset_fences(session, table.dialect, NAME, table.path)
        zero = base64.b64encode(START_FROM_ZERO).decode()
        assert table.rows() == [
            ("other", WHOLE.begin, WHOLE.end, 1, base64.b64encode(b"other").decode()),
            (NAME, LOWER.begin, LOWER.end, 2, zero),
        ]
        with pytest.raises(Fenced):
            table.commit(held, b"zombie")
        table.commit(other, b"other")
        assert table.install(LOWER).checkpoint == START_FROM_ZERO


def test_commit_whose_condition_fails_raises_fenced_and_changes_nothing(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        held = table.install(WHOLE)
        before = table.rows()
        arguments = (session, table.dialect, held, b"then", table.path)
        with (
            pytest.raises(Fenced, match=f'^stream of materialization "{NAME}" {WHOLE} is fenced'),
            session.transaction(),
        ):
            commit_fence(*arguments, condition="1 = ?", parameters=[2])
        assert table.rows() == before
        with session.transaction():
            commit_fence(*arguments, condition="1 = ?", parameters=[1])
        assert table.install(WHOLE).checkpoint == b"then"


def test_checkpoint_table_has_one_row_for_a_range_and_is_created_once(sql: Sql) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        session.run(create_checkpoints(table.dialect, table.path))
        table.put([[NAME, 0, 5, 1, ""], [NAME, 0, 6, 1, ""], [NAME, 1, 5, 1, ""]])
        table.put([["other", 0, 5, 1, ""]])
        with pytest.raises(PenstockError):
            table.put([[NAME, 0, 5, 2, ""]])


RANGES = [KeyRange(begin, end) for begin in range(4) for end in range(begin, 4)]


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.lists(st.sampled_from(RANGES), max_size=24), st.randoms(use_true_random=False))
def test_fenced_stream_never_matches_a_row_again(sql: Sql, opened: Any, random: Any) -> None:
    with sql.session() as session:
        table = Checkpoints(sql, session)
        session.run(f"DELETE FROM {table.dialect.quoted_path(table.path)}")
        alive: list[Fence] = []
        dead: list[Fence] = []
        for key_range in opened:
            held = table.install(key_range)
            dead += [each for each in alive if each.key_range.overlaps(key_range)]
            alive = [each for each in alive if not each.key_range.overlaps(key_range)]
            alive.append(held)
            assert not {(each.key_range, each.fence) for each in dead} & {
                (KeyRange(row[1], row[2]), row[3]) for row in table.rows()
            }
            if random.random() < 0.5:
                table.commit(random.choice(alive), b"some")


def test_every_fence_vector_has_a_test() -> None:
    assert {*CASES} == {*INSTALLS, "fence-06", "fence-07", "fence-08"}
