"""Last record of each key, with unavailable values filled from earlier records."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DefiniteError
from penstock.sources.debezium.last_by_key import (
    UnavailableValues,
    fill_from_stored,
    last_by_key,
)

WORD = "__debezium_unavailable_value"
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("gone", pa.bool_()),
        ("at", pa.int64()),
    ]
)
UNAVAILABLE = UnavailableValues("gone", "t")

deeds = st.tuples(st.integers(1, 2), st.sampled_from(["all", "text", "raw", "none", "gone"]))


@given(st.lists(st.lists(deeds, max_size=5), max_size=4), st.booleans())
def test_last_record_of_key_has_all_values_wherever_records_are_split(
    parts: list[list[tuple[int, str]]], before: bool
) -> None:
    """Records are split into parts of side state, or into the ticks of a topic."""
    ids = (1, 2) if before else ()
    stored = {id: (f"was {id}", f"raw {id}".encode()) for id in ids}
    wanted, at, last = dict(stored), 0, SCHEMA.empty_table()
    for part in parts:
        rows = []
        for id, deed in part:
            at += 1
            made = deed if id in wanted or deed == "gone" else "all"
            text, raw = f"text {at}", f"raw {at}".encode()
            known = wanted.get(id, (text, raw))
            if made == "gone":
                wanted.pop(id, None)
            else:
                wanted[id] = (
                    text if made in ("all", "text") else known[0],
                    raw if made in ("all", "raw") else known[1],
                )
            rows.append(
                {
                    "id": id,
                    "text": text if made in ("all", "text") else WORD,
                    "raw": raw if made in ("all", "raw") else WORD.encode(),
                    "gone": made == "gone",
                    "at": at,
                }
            )
        more = pa.Table.from_pylist(rows, schema=SCHEMA)
        last = last_by_key(
            pa.concat_tables([last, more]),
            ["id"],
            ["at"],
            unavailable=UNAVAILABLE,
        )
    come = last.filter(pa.compute.invert(last.column("gone")))
    table = pa.Table.from_pylist(
        [{"id": id, "text": text, "raw": raw} for id, (text, raw) in stored.items()],
        schema=pa.schema(list(SCHEMA)[:3]),
    )
    touched = {row["id"] for row in last.to_pylist()}
    found = fill_from_stored(
        come.select(["id", "text", "raw"]), table, ["id"], topic="t"
    ).to_pylist()
    assert {row["id"]: (row["text"], row["raw"]) for row in found} == {
        id: values for id, values in wanted.items() if id in touched
    }


def test_last_record_of_key_is_independent_of_record_order() -> None:
    """In one call, a missing value may come from a record that follows in the table."""
    rows = [
        {"id": 1, "text": "first", "raw": b"", "gone": False, "at": 1},
        {"id": 1, "text": WORD, "raw": b"", "gone": False, "at": 3},
        {"id": 1, "text": "second", "raw": b"", "gone": False, "at": 2},
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    (last,) = last_by_key(table, ["id"], ["at"], unavailable=UNAVAILABLE).to_pylist()
    assert last["text"] == "second"


def test_unavailable_value_is_not_filled_from_deleted_row() -> None:
    rows = [
        {"id": 2, "text": None, "raw": None, "gone": True, "at": 1},
        {"id": 2, "text": WORD, "raw": b"", "gone": False, "at": 2},
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with pytest.raises(DefiniteError, match="not known: id 2"):
        last_by_key(table, ["id"], ["at"], unavailable=UNAVAILABLE)


def test_unavailable_value_without_stored_row_raises_definite_error() -> None:
    come = pa.table({"id": [7], "text": [WORD]})
    with pytest.raises(DefiniteError, match="not known: id 7"):
        fill_from_stored(come, come.slice(0, 0), ["id"], topic="t")
