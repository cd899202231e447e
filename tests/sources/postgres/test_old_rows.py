"""Resolution of row messages into deletes and inserts, compared with a model of the table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DefiniteError
from penstock.sources.postgres import old_rows
from penstock.sources.postgres.old_rows import (
    Changes,
    CollectionDiverged,
    Resolved,
    resolve,
    split_changes,
)

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.string()), ("n", pa.int64()), ("big", pa.string())])
KEY = ["a", "b"]

Row = tuple[int, str, int | None, str | None]
NewRow = tuple[int, str | None, int | None, str | None]  # A large key may be omitted.
Message = tuple[str, bool, Row | None, NewRow | None, bool]


@dataclass
class Table:
    """A table upstream that writes down what Postgres would send of its changes."""

    full: bool = False
    rows: dict[tuple[int, str], Row] = field(default_factory=dict)
    messages: list[tuple[str, bool, Row | None, Row | None, bool]] = field(default_factory=list)

    def insert(self, row: Row) -> None:
        self.rows[row[:2]] = row
        self.messages.append(("I", False, None, row, False))

    def delete(self, key: tuple[int, str]) -> None:
        row = self.rows.pop(key)
        self.messages.append(
            ("D", self.full, row if self.full else (*key, None, None), None, False)
        )

    def update(self, key: tuple[int, str], row: Row, *, keeps_big: bool) -> None:
        old = self.rows.pop(key)
        new = (*row[:3], old[3] if keeps_big else row[3])
        self.rows[new[:2]] = new
        told = old if self.full else None if new[:2] == key else (*key, None, None)
        sent = (*row[:3], None) if keeps_big else new
        self.messages.append(("U", self.full, told, sent, keeps_big))


def changes_of(messages: Sequence[Message]) -> Changes:
    old = [each[2] for each in messages if each[2] is not None]
    new = [each[3] for each in messages if each[3] is not None]
    left_out = [each[4] for each in messages if each[3] is not None]
    return Changes(
        kind=np.array([ord(each[0]) for each in messages], np.uint8),
        old=table_of(old),
        old_row=numbered([each[2] is not None for each in messages]),
        whole=np.array([each[1] for each in messages], np.bool_),
        new=table_of(new),
        new_row=numbered([each[3] is not None for each in messages]),
        unchanged={"big": np.array(left_out, np.bool_)},
    )


def numbered(is_present: list[bool]) -> np.ndarray:
    counts = np.cumsum(np.array(is_present, np.int64)) - 1
    return np.where(np.array(is_present, np.bool_), counts, -1).astype(np.int64)


def table_of(rows: Sequence[NewRow]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def rows_of(table: pa.Table) -> Counter[Row]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def lookup_in(stored: Mapping[tuple[int, str], Row]):
    def lookup(keys: pa.Table) -> pa.Table:
        asked = list(zip(*(column.to_pylist() for column in keys.columns), strict=True))
        assert len(asked) == len(set(asked)), "each key is looked up once"
        return table_of([stored[key] for key in reversed(asked) if key in stored])

    return lookup


def after(stored: Mapping[tuple[int, str], Row], resolved: Resolved) -> Counter[Row]:
    contents = Counter(stored.values())
    contents.subtract(rows_of(resolved.deletes))
    contents.update(rows_of(resolved.inserts))
    return +contents if all(n >= 0 for n in contents.values()) else contents


values = st.tuples(
    st.integers(0, 3),
    st.sampled_from("xy"),
    st.none() | st.integers(0, 9),
    st.none() | st.text("pq", max_size=3),
)


@st.composite
def histories(pick: st.DrawFn) -> tuple[dict[tuple[int, str], Row], Table]:
    stored = {row[:2]: row for row in pick(st.lists(values, max_size=5))}
    table = Table(rows=dict(stored))
    for _ in range(pick(st.integers(0, 12))):
        table.full = pick(st.booleans()) if pick(st.integers(0, 9)) == 0 else table.full
        row = pick(values)
        held = sorted(table.rows)
        deed = pick(st.sampled_from(["insert", "update", "move", "delete"]))
        if not held or (deed == "insert" and row[:2] not in table.rows):
            if row[:2] not in table.rows:
                table.insert(row)
            continue
        key = pick(st.sampled_from(held))
        if deed == "delete":
            table.delete(key)
        elif deed == "move" and row[:2] not in table.rows:
            table.update(key, row, keeps_big=pick(st.booleans()))
        else:
            table.update(key, (*key, *row[2:]), keeps_big=pick(st.booleans()))
    return stored, table


@given(histories())
def test_resolved_changes_make_stored_rows_equal_the_table(history):
    stored, table = history
    resolved = resolve(changes_of(table.messages), KEY, lookup_in(stored), table="public.t")
    assert after(stored, resolved) == Counter(table.rows.values())


@given(histories(), st.data())
def test_changes_resolved_in_one_call_or_several_have_equal_results(history, data):
    stored, table = history
    cut = data.draw(st.integers(0, len(table.messages)))
    held = Counter(stored.values())
    for part in (table.messages[:cut], table.messages[cut:]):
        now = {row[:2]: row for row in held}
        held = after(now, resolve(changes_of(part), KEY, lookup_in(now), table="public.t"))
    assert held == Counter(table.rows.values())


@given(histories(), st.data())
def test_changes_resolved_in_parts_have_equal_results(history, data):
    stored, table = history
    limits = []

    def most() -> int:
        limits.append(data.draw(st.integers(0, 4)))
        return limits[-1]

    held, messages = Counter(stored.values()), 0
    for part in split_changes(changes_of(table.messages), KEY, most):
        in_want = np.count_nonzero((part.kind != ord("I")) & ~part.whole)
        assert in_want <= max(1, limits[-1])
        now = {row[:2]: row for row in held}
        held = after(now, resolve(part, KEY, lookup_in(now), table="public.t"))
        messages += len(part)
    assert held == Counter(table.rows.values())
    assert messages == len(table.messages)


def test_split_changes_orders_lookups_by_key_unless_keys_change():
    table = Table(rows={(n, "x"): (n, "x", 0, "") for n in range(6)})
    for n in (5, 1, 4, 0, 3):
        table.delete((n, "x"))

    def looked_up_keys() -> list[list[int]]:
        parts = split_changes(changes_of(table.messages), KEY, lambda: 2)
        return [part.old.column("a").to_pylist() for part in parts]

    assert [sorted(part) for part in looked_up_keys()] == [[0, 1], [3, 4], [5]]
    table.update((2, "x"), (7, "x", 0, ""), keeps_big=False)
    assert looked_up_keys() == [[5, 1], [4, 0], [3, 2]]


def test_split_changes_without_lookups_yields_one_part():
    table = Table()
    for n in range(9):
        table.insert((n, "x", 0, ""))
    changes = changes_of(table.messages)
    assert list(split_changes(changes, KEY, lambda: 0)) == [changes]


def test_insert_and_partial_update_of_one_key_resolve_to_one_insert():
    table = Table()
    table.insert((1, "x", 1, "large"))
    table.update((1, "x"), (2, "x", 5, None), keeps_big=True)
    table.update((2, "x"), (2, "x", 6, None), keeps_big=True)
    resolved = resolve(changes_of(table.messages), KEY, lookup_in({}), table="public.t")
    assert rows_of(resolved.inserts) == Counter([(2, "x", 6, "large")])
    assert resolved.deletes.num_rows == 0


def test_omitted_large_key_is_filled_from_the_old_tuple():
    changes = changes_of([("U", False, (1, "x", None, None), (1, None, 7, "z"), False)])
    changes = Changes(
        changes.kind,
        changes.old,
        changes.old_row,
        changes.whole,
        changes.new,
        changes.new_row,
        {"b": np.array([True])},
    )
    resolved = resolve(changes, KEY, lookup_in({(1, "x"): (1, "x", 3, "w")}), table="public.t")
    assert rows_of(resolved.inserts) == Counter([(1, "x", 7, "z")])
    assert rows_of(resolved.deletes) == Counter([(1, "x", 3, "w")])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([("D", False, (1, "x", None, None), None, False)], "no stored row has this key"),
        ([("D", False, (2, "x", None, None), None, False)] * 2, "row to delete does not exist"),
        (
            [("I", False, None, (3, "x", 1, None), False)] * 2
            + [("D", False, (2, "x", None, None), None, False)],
            "row to insert exists",
        ),
    ],
)
def test_contradicting_message_raises_collection_diverged_with_its_key(messages, what):
    stored = {(2, "x"): (2, "x", 0, None)}
    with pytest.raises(CollectionDiverged, match=what) as caught:
        resolve(changes_of(messages), KEY, lookup_in(stored), table="public.t")
    assert "a = " in caught.value.detail
    assert "b = 'x'" in caught.value.detail


def test_change_without_key_and_old_row_raises_definite_error():
    changes = changes_of([("D", False, (1, "x", None, None), None, False)])
    with pytest.raises(DefiniteError, match="has no old row") as caught:
        resolve(changes, [], lookup_in({}), table="public.t")
    assert "REPLICA IDENTITY FULL" in caught.value.hint


def planted_stored_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up each old row in the stored rows, without the changes in flight."""
    real = old_rows._chain

    def chain(changes: Changes, key, *, table: str):
        found = real(changes, key, table=table)
        takes = np.flatnonzero((changes.kind != ord("I")) & (found.before != -1) & ~changes.whole)
        stored = found.stored.copy()
        stored[takes] = found.keys.num_rows + np.arange(len(takes))
        old = [changes.old_row[m] for m in takes]
        keys = [
            (changes.old if row != -1 else changes.new)
            .select(key)
            .slice(row if row != -1 else changes.new_row[m], 1)
            for m, row in zip(takes, old, strict=True)
        ]
        wanted = pa.concat_tables([found.keys, *keys])
        return old_rows._Chain(np.full(len(changes), -1, np.int64), stored, wanted)

    monkeypatch.setattr(old_rows, "_chain", chain)


def planted_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up the old row by the key of the new row."""
    real = old_rows._chain

    def chain(changes: Changes, key, *, table: str):
        blind = np.where(changes.new_row != -1, -1, changes.old_row)
        return real(
            Changes(changes.kind, changes.old, blind, changes.whole, changes.new, changes.new_row),
            key,
            table=table,
        )

    monkeypatch.setattr(old_rows, "_chain", chain)


@pytest.mark.parametrize("plant", [planted_stored_only, planted_new_key])
def test_checker_detects_planted_lookup_in_the_wrong_place(monkeypatch, plant):
    stored = {(1, "x"): (1, "x", 0, "old"), (2, "x"): (2, "x", 0, "other")}
    table = Table(rows=dict(stored))
    table.update((1, "x"), (1, "x", 1, "mid"), keeps_big=False)
    table.update((1, "x"), (3, "x", 2, None), keeps_big=True)
    plant(monkeypatch)
    try:
        resolved = resolve(changes_of(table.messages), KEY, lookup_in(stored), table="public.t")
    except (CollectionDiverged, AssertionError):
        return
    assert after(stored, resolved) != Counter(table.rows.values())
