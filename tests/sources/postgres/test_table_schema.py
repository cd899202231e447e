"""Schema of a tracked table after its catalog description has changed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import evolve
from penstock.errors import UsageError
from penstock.sources.postgres import state
from penstock.sources.postgres.catalog import PgColumn, PgTable, PgType
from penstock.sources.postgres.config import TableSpec
from penstock.sources.postgres.names import TableName
from penstock.sources.postgres.pgoutput import Relation, RelationColumn
from penstock.sources.postgres.table_schema import (
    SchemaMismatch,
    Table,
    build_table,
    default_values,
    evolve_table,
    matches_relation,
)
from penstock.sources.postgres.table_set import check_collections
from penstock.sources.postgres.table_state import TableState
from penstock.sources.postgres.tracked_table import TrackedTable

INT2, INT4 = PgType(21, "smallint", "b", "N"), PgType(23, "integer", "b", "N")
INT8, OID = PgType(20, "bigint", "b", "N"), PgType(26, "oid", "b", "N")
FLOAT4, FLOAT8 = PgType(700, "real", "b", "N"), PgType(701, "double precision", "b", "N")
TEXT, NUMERIC = PgType(25, "text", "b", "S"), PgType(1700, "numeric", "b", "N")
INTS = PgType(1007, "integer[]", "b", "A", element=INT4)


def decimal(precision: int, scale: int) -> tuple[PgType, int]:
    return NUMERIC, (precision << 16 | scale) + 4


TYPES = st.sampled_from(
    [
        *((kind, -1) for kind in (INT2, INT4, INT8, OID, TEXT, FLOAT4, FLOAT8, NUMERIC, INTS)),
        *(decimal(p, s) for p, s in ((5, 2), (6, 1), (38, 0), (38, 38), (7, 2))),
    ]
)
SPEC = TableSpec(TableName("public", "t"), exclude=("photo",), text=("odd",))


def table(columns: list[PgColumn], *, key: tuple[str, ...] = ("id",)) -> PgTable:
    return PgTable(
        oid=1, schema="public", name="t", kind="r", persistence="p", replica_identity="d",
        columns=tuple(columns), primary_key=key, identity=key, published=True,
        published_columns=None, streamed=tuple(each.name for each in columns), row_filter=None,
        filter_columns=(), leaves=(), ancestors=(), pages=1, estimated_rows=1, bytes=1,
    )  # fmt: skip


@st.composite
def descriptions(pick: st.DrawFn) -> list[PgTable]:
    """Return successive descriptions of a table: a column keeps its number, none is reused."""
    columns, number, described = [PgColumn("id", 1, INT4)], 1, []
    for _ in range(pick(st.integers(2, 6))):
        for _ in range(pick(st.integers(0, 3))):
            names = [each.name for each in columns[1:]]
            match pick(st.sampled_from(["add", "add", "drop", "rename", "retype"])):
                case "add":
                    number += 1
                    name = pick(st.sampled_from(["a", "b", "c", "odd", "photo"]))
                    kind, typmod = pick(TYPES)
                    missing = (
                        "1" if kind in (INT2, INT4, INT8, TEXT) and pick(st.booleans()) else None
                    )
                    if name not in names:
                        columns.append(
                            PgColumn(
                                name,
                                number,
                                kind,
                                typmod,
                                missing=missing,
                                has_missing=missing is not None,
                            )
                        )
                case "drop" if names:
                    columns.pop(pick(st.integers(1, len(names))))
                case "rename" if names:
                    at = pick(st.integers(1, len(names)))
                    name = pick(st.sampled_from(["a", "b", "c"]))
                    if name not in names:
                        columns[at] = replace(columns[at], name=name)
                case "retype" if names:
                    at = pick(st.integers(1, len(names)))
                    kind, typmod = pick(TYPES)
                    columns[at] = replace(
                        columns[at], type=kind, typmod=typmod, missing=None, has_missing=False
                    )
                case _:
                    pass
        described.append(table(list(columns)))
    return described


def relation(described: PgTable, count: int | None = None) -> Relation:
    columns = tuple(
        RelationColumn(each.name, each.type.oid, each.typmod, each.name == "id")
        for each in described.columns
    )
    return Relation(1, "public", "t", "d", columns[:count])


@given(descriptions(), st.booleans())
def test_evolved_table_only_extends_stored_columns(
    descriptions_of_table: list[PgTable], accepted: bool
) -> None:
    current = build_table("shop", descriptions_of_table[0], SPEC)
    for described in descriptions_of_table[1:]:
        fitted = evolve_table(current, described, accepted=accepted)
        if isinstance(fitted, SchemaMismatch):
            continue
        added = fitted.columns[len(current.columns) :]
        # Persist would refuse it, and the whole source would stop.
        evolve(current.schema, fitted.schema, default_values(added), collection="c")
        assert matches_relation(fitted, relation(described))
        assert matches_relation(fitted, relation(described, count=1))
        assert build_table("shop", described, SPEC, fitted.stored, fitted.key_columns) == fitted
        assert "photo" not in fitted.schema.names
        current = fitted


@given(descriptions())
def test_column_position_equals_position_in_messages(descriptions_of_table: list[PgTable]) -> None:
    current = build_table("shop", descriptions_of_table[0], SPEC)
    for described in descriptions_of_table[1:]:
        fitted = evolve_table(current, described)
        if isinstance(fitted, Table):
            for kept, column in zip(fitted.stored, fitted.columns, strict=True):
                if column.position is None:
                    assert kept.learned
                    assert column.name not in [
                        each.name for each in described.columns if each.name not in SPEC.exclude
                    ]
                else:
                    there = described.columns[column.position]
                    assert (there.name, there.number) == (column.name, kept.shape.number)
            current = fitted


def test_narrower_type_is_cast_to_the_wider_stored_type() -> None:
    before = build_table(
        "shop", table([PgColumn("id", 1, INT4), PgColumn("n", 2, *decimal(5, 2))]), SPEC
    )
    fitted = evolve_table(
        before, table([PgColumn("id", 1, INT2), PgColumn("n", 2, *decimal(6, 1))])
    )
    assert isinstance(fitted, Table)
    assert fitted.schema.field("id").type == pa.int32()
    assert fitted.schema.field("n").type == pa.decimal128(7, 2)
    id, n = fitted.columns
    assert id.type.from_text(pa.array([b"-7", None], pa.binary())).to_pylist() == [-7, None]
    assert [str(v) for v in n.type.from_text(pa.array([b"12345.6"], pa.binary()))] == ["12345.60"]


def test_swapped_column_names_are_a_mismatch() -> None:
    a, b = PgColumn("a", 2, INT4), PgColumn("b", 3, INT4)
    before = build_table("shop", table([PgColumn("id", 1, INT4), a, b]), SPEC)
    swapped = table([PgColumn("id", 1, INT4), replace(a, name="b"), replace(b, name="a")])
    assert evolve_table(before, swapped) == SchemaMismatch(
        'column "a" is now "b"', replaceable=True
    )
    accepted = evolve_table(before, swapped, accepted=True)
    assert isinstance(accepted, Table)
    assert [(column.name, column.position) for column in accepted.columns] == [
        ("id", 0), ("a", 2), ("b", 1),
    ]  # fmt: skip


class _State:
    """State of a source, in memory."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def names(self) -> list[str]:
        return sorted(self.values)

    def put(self, values: Mapping[str, Any]) -> None:
        self.values |= values


def _tracked(oid: int, schema: str, name: str) -> TrackedTable:
    described = replace(table([PgColumn("id", 1, INT4)]), oid=oid, schema=schema, name=name)
    return TrackedTable(
        build_table("app2", described, TableSpec(TableName(schema, name))), TableState.LIVE
    )


def test_collection_name_of_a_tracked_table_is_durable() -> None:
    written = state.tables([_tracked(1, "weird", "dot.t"), _tracked(2, "weird.dot", "t")])
    recalled = state.read_state(_State(written)).tables
    names = [each.table.collection for each in recalled]
    assert names == ['app2.weird."dot.t"', 'app2."weird.dot".t']
    assert [each.table.source for each in recalled] == ["app2", "app2"]
    check_collections("app2", "file:lake", [each.table for each in recalled])


def test_state_of_a_version_without_quotes_keeps_names_and_rejects_shared_ones() -> None:
    written = state.tables([_tracked(1, "weird", "dot.t"), _tracked(2, "weird.dot", "t")])
    older = {
        name: {key: value for key, value in note.items() if key != "collection"}
        for name, note in written.items()
    }
    first, second = (each.table for each in state.read_state(_State(older)).tables)
    assert first.collection == second.collection == "app2.weird.dot.t"
    assert evolve_table(first, first.described) == first
    check_collections("app2", "file:lake", [first])
    with pytest.raises(UsageError, match=r'share the collection "app2.weird.dot.t"') as raised:
        check_collections("app2", "file:lake", [first, second])
    assert "penstock drop file:lake app2" in raised.value.hint
