"""Several operations on one collection in one tick transaction."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from penstock.data import DIFF
from penstock.errors import DefiniteError
from penstock.ingest import tick_transaction as tick_module
from penstock.ingest.tick_transaction import TickTransaction, _counted, _matching
from penstock.persist import CollectionErrored
from penstock.testing.sources import ScriptedSource
from tests.ingest.test_loop import turn

__all__ = ["turn"]


class Fickle(ScriptedSource):
    """Source whose ticks fail and recover its collection as `deeds` lists."""

    def __init__(self) -> None:
        super().__init__("kafka")
        self.deeds: list[str] = []

    def read_into(self, tick: Any, up_to: Any) -> Any:
        drawn = super().read_into(tick, up_to)
        for deed in self.deeds:
            if deed == "recover":
                tick.recover(self.collection)
            else:
                tick.fail(self.collection, DefiniteError(deed))
        self.deeds = []
        return drawn


@pytest.mark.parametrize(
    "deeds", [["recover", "again"], ["recover", "again", "recover", "once more"]]
)
def test_collection_that_recovers_and_fails_in_one_tick_keeps_first_error(
    turn: Callable[..., Any], deeds: list[str]
) -> None:
    source = Fickle()
    run = turn(source)
    uppers = []
    for at, told in enumerate(([], ["first"], deeds, ["recover"])):
        source.append(0, f"word {at}")
        source.deeds = list(told)
        run.ticks(1)
        uppers.append(run.client.collection("words").upper)
    words = run.client.collection("words")
    for upper in uppers[1:3]:
        with pytest.raises(CollectionErrored, match="first"):
            words.snapshot(upper - 1)
    assert [data["word"] for data, _, _ in words.snapshot(uppers[3] - 1)]


class Acting(ScriptedSource):
    """Source whose next tick runs a function after it has read its words."""

    def __init__(self) -> None:
        super().__init__("kafka")
        self.act: Callable[[TickTransaction], None] | None = None

    def read_into(self, tick: Any, up_to: Any) -> Any:
        drawn = super().read_into(tick, up_to)
        act, self.act = self.act, None
        if act:
            act(tick)
        return drawn


class Ticks:
    """Runner of functions in ticks of one source."""

    def __init__(self, turn: Callable[..., Any]) -> None:
        self.source = Acting()
        self.run = turn(self.source)
        self.count = 0

    def tick(self, act: Callable[[TickTransaction], None]) -> None:
        self.source.append(0, f"word {self.count}")
        self.count += 1
        self.source.act = act
        self.run.ticks(1)

    def side_state(self, name: str) -> list[int]:
        """Read the numbers of a side state in a tick that changes nothing."""
        found: list[int] = []
        self.tick(lambda tick: found.extend(numbers(tick, name)))
        return found

    def words(self) -> list[str]:
        words = self.run.client.collection("words")
        return sorted(data["word"] for data, _, _ in words.snapshot(words.upper - 1))


def rows_of(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def numbers(tick: TickTransaction, name: str) -> list[int]:
    return [n for table in tick.side_rows(name) for n in table.column("n").to_pylist()]


@pytest.mark.parametrize("spool_bytes", [0, 1 << 20], ids=["in files", "in memory"])
def test_side_state_is_readable_by_later_ticks_until_dropped(
    turn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spool_bytes: int
) -> None:
    monkeypatch.setattr(tick_module, "SPOOL_BYTES", spool_bytes)
    ticks = Ticks(turn)
    ticks.tick(lambda tick: tick.append_side_rows("a", rows_of(1, 2)))

    def more(tick: TickTransaction) -> None:
        tick.append_side_rows("a", rows_of(3))
        tick.append_side_rows("b", rows_of(7))
        assert sorted(numbers(tick, "a")) == [1, 2, 3]

    ticks.tick(more)
    assert sorted(ticks.side_state("a")) == [1, 2, 3]
    assert ticks.side_state("b") == [7]

    def none(tick: TickTransaction) -> None:
        tick.append_side_rows("a", rows_of(4))
        tick.discard_side_rows("a")

    ticks.tick(none)
    assert sorted(ticks.side_state("a")) == [1, 2, 3]
    ticks.tick(lambda tick: tick.retain_side_rows({"b"}))
    assert ticks.side_state("a") == []
    assert ticks.side_state("b") == [7]
    ticks.tick(lambda tick: tick.drop_side_rows("b"))
    assert ticks.side_state("b") == []
    assert ticks.words() == sorted(f"word {at}" for at in range(ticks.count))


@pytest.mark.parametrize("spool_bytes", [0, 1 << 20], ids=["in files", "in memory"])
def test_lookup_returns_rows_of_earlier_ticks_and_current_tick(
    turn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, spool_bytes: int
) -> None:
    monkeypatch.setattr(tick_module, "SPOOL_BYTES", spool_bytes)
    ticks = Ticks(turn)
    found: list[str] = []

    def request_rows(tick: TickTransaction) -> None:
        keys = pa.table({"partition": ["0", "0", "1"], "offset": pa.array([0, 2, 1], pa.int64())})
        rows = tick.lookup("words", keys)
        assert DIFF not in rows.column_names
        found.extend(sorted(rows.column("word").to_pylist()))

    for act in (lambda _: None, lambda _: None, request_rows):
        ticks.tick(act)
    assert found == ["word 0", "word 2"]


def test_truncate_of_collection_deletes_and_counts_all_rows(
    turn: Callable[..., Any],
) -> None:
    ticks = Ticks(turn)
    ticks.tick(lambda _: None)
    counted: list[tuple[int, int]] = []

    def empty(tick: TickTransaction) -> None:
        before = tick.rows
        tick.truncate("words")
        counted.append((before, tick.rows))

    ticks.tick(empty)
    assert ticks.words() == []
    assert counted == [(1, 3)]  # The word of this tick, and two deletes.
    ticks.tick(lambda _: None)
    assert ticks.words() == ["word 2"]


def diffs(*rows: tuple[str, int]) -> pa.Table:
    names, counts = zip(*rows, strict=True) if rows else ((), ())
    return pa.table({"k": pa.array(names, pa.string()), DIFF: pa.array(counts, pa.int64())})


def test_counted_rows_are_consolidated_without_zero_diffs() -> None:
    found = _counted([diffs(("a", 1), ("b", 1)), diffs(("a", -1), ("b", 1), ("c", 1))])
    assert found.column_names == ["k", DIFF]
    assert sorted(map(tuple, (row.values() for row in found.to_pylist()))) == [("b", 2), ("c", 1)]


def test_matching_returns_rows_of_given_keys() -> None:
    rows = diffs(("a", 1), ("b", 1), ("a", -1))
    keys = pa.table({"k": ["a", "z"]})
    assert _matching(rows, keys).column("k").to_pylist() == ["a", "a"]
    assert _matching(rows, keys.slice(0, 0)) == rows.slice(0, 0)
    assert _matching(rows.slice(0, 0), keys) == rows.slice(0, 0)
