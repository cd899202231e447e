"""Schema changes that alter rows without an update: the endpoint equals the collection."""

import contextlib
import decimal
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import materialize, persist
from penstock.data import DIFF, TIME
from penstock.engine.preflight import plan_file
from penstock.errors import IndeterminateError, UsageError
from penstock.failpoints import Action, Failpoint, armed
from penstock.materialize.backfill import ForeignRows
from penstock.materialize.spec_builder import IncompatibleResource
from penstock.persist import Collection
from tests.chaos.defects import planted
from tests.materialize.lake import Endpoint, bring, materializing, once

ID = pa.field("id", pa.int64(), nullable=False)
STEPS = (
    Failpoint.APPLY_DONE,
    Failpoint.PLAN_DONE,
    Failpoint.STORE_DONE,
    Failpoint.RECOVERY_DONE,
    Failpoint.ACKNOWLEDGE_DONE,
)
ALL = ("sqlite", "plain-files", "staged-files")


class Grown:
    """A collection whose schema changes."""

    def __init__(self, lake: str, **columns: pa.DataType) -> None:
        self.client = persist.open(f"{lake}/shop", writer="upstream")
        self.schema = pa.schema([ID, *columns.items()])
        self.client.create_or_load("shop.t", schema=self.schema, key_columns=["id"])

    @property
    def collection(self) -> Collection:
        return self.client.collection("shop.t")

    def alter(self, *fields: pa.Field, **defaults: Any) -> None:
        """Add columns, or replace columns of the same name."""
        given = {field.name: field for field in fields}
        kept = [given.pop(field.name, field) for field in self.schema]
        self.schema = pa.schema([*kept, *given.values()])
        self.collection.alter(self.schema, defaults=defaults)

    def add(self, *rows: Sequence[Any]) -> None:
        self.update([(*row, +1) for row in rows])

    def update(self, updates: Sequence[Sequence[Any]]) -> None:
        """Append rows that end in a diff, at the next time."""
        upper = self.collection.upper
        columns = [*zip(*updates, strict=True)] or [()] * (len(self.schema) + 1)
        table = pa.table(
            {
                **{
                    field.name: pa.array(values, field.type)
                    for field, values in zip(self.schema, columns, strict=False)
                },
                TIME: pa.array([upper] * len(updates), pa.int64()),
                DIFF: pa.array(columns[-1], pa.int64()),
            }
        )
        self.collection.compare_and_append(table, upper, upper + 1)

    def contents(self) -> list[Mapping[str, Any]]:
        found = self.collection
        rows = [each.data for each in found.snapshot(found.upper - 1)]
        return sorted(rows, key=lambda row: row["id"])

    def __enter__(self) -> "Grown":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def columns(folder: Path, names: str) -> list[tuple[Any, ...]]:
    """Return columns of the SQLite table, by id."""
    with contextlib.closing(sqlite3.connect(folder / "t.db")) as database:
        return database.execute(f"SELECT {names} FROM t ORDER BY id").fetchall()


@pytest.mark.parametrize("connector", ALL)
def test_added_columns_are_stored_in_rows_without_updates(
    lake: str, tmp_path: Path, connector: str
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path)
        table.alter(
            pa.field("n", pa.int32(), nullable=False),
            pa.field("note", pa.string()),
            pa.field("label", pa.string()),
            n=7,
            label="it's",
        )
        table.update([(2, "b", 7, None, "it's", -1), (2, "b", 9, "x", None, 1)])
        bring(lake, endpoint, tmp_path)
        assert endpoint.rows() == table.contents()
        assert [row["n"] for row in endpoint.rows()] == [7, 9]


@pytest.mark.parametrize("document", [True, False])
def test_added_columns_are_stored_in_sqlite_columns_of_existing_rows(
    lake: str, tmp_path: Path, document: bool
) -> None:
    bound = {"resource": {"table": "t", "document": document}}
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, **bound)
        table.alter(pa.field("n", pa.int32(), nullable=False), pa.field("note", pa.string()), n=7)
        table.add((3, "c", 9, "x"))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, **bound)
    assert columns(tmp_path, "id, n, note") == [(1, 7, None), (2, 7, None), (3, 9, "x")]


@pytest.mark.parametrize("connector", ALL)
@pytest.mark.parametrize("step", STEPS)
def test_added_column_with_default_is_stored_after_crash_at_each_step(
    lake: str, tmp_path: Path, connector: str, step: Failpoint
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"), (3, "c"))
        bring(lake, endpoint, tmp_path)
        table.alter(pa.field("n", pa.int32(), nullable=False), n=7)
        table.update([(2, "b", 7, -1), (2, "b", 8, 1), (3, "c", 7, -1)])
        with (
            materializing(lake, endpoint, tmp_path) as materialization,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(materialization)
        table.update([(1, "a", 7, -1), (1, "a", 6, 1), (4, "d", 5, 1)])
        bring(lake, endpoint, tmp_path)
        assert endpoint.rows() == table.contents()


@pytest.mark.parametrize("document", [True, False])
def test_widened_types_are_stored_in_same_format_in_all_rows(
    lake: str, tmp_path: Path, document: bool
) -> None:
    bound = {"resource": {"table": "t", "document": document}}
    two = decimal.Decimal("1.50")
    with Grown(
        lake, price=pa.decimal128(10, 2), ratio=pa.float32(), count=pa.int16(), text=pa.string()
    ) as table:
        table.add((1, two, 0.1, 4, "t"), (2, two, 0.1, 4, "t"))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, **bound)
        table.alter(
            pa.field("price", pa.decimal128(14, 4)),
            pa.field("ratio", pa.float64()),
            pa.field("count", pa.int64()),
            pa.field("text", pa.large_string()),
        )
        table.add((3, two, 0.10000000149011612, 4, "t"))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, **bound)
    (one, *others) = columns(tmp_path, "price, ratio, count, text")
    assert one == ("1.5000", 0.10000000149011612, 4, "t")
    assert others == [one, one]


def test_widened_integer_column_does_not_rewrite_existing_rows(lake: str, tmp_path: Path) -> None:
    with Grown(lake, count=pa.int16()) as table:
        table.add((1, 4), (2, 5))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path)
        table.alter(pa.field("count", pa.int64(), nullable=True))
        table.add((3, 1 << 40))
        with materializing(lake, Endpoint("sqlite", tmp_path), tmp_path) as materialization:
            once(materialization)
            assert materialization.status().documents == 1
    assert columns(tmp_path, "id, count") == [(1, 4), (2, 5), (3, 1 << 40)]


def test_included_field_is_stored_in_rows_without_updates(lake: str, tmp_path: Path) -> None:
    resource = {"table": "t", "document": False}
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path, resource=resource, fields={"exclude": ["name"]})
        assert columns(tmp_path, "*") == [(1,), (2,)]
        bring(lake, endpoint, tmp_path, resource=resource)
        assert columns(tmp_path, "id, name") == [(1, "a"), (2, "b")]


def test_added_column_with_default_is_filled_without_rewriting_rows(
    lake: str, tmp_path: Path
) -> None:
    resource = {"table": "t", "document": False}
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path, resource=resource)
        table.alter(
            pa.field("n", pa.int32(), nullable=False),
            pa.field("price", pa.decimal128(6, 2)),
            pa.field("ratio", pa.float64()),
            pa.field("flag", pa.bool_()),
            pa.field("data", pa.binary()),
            pa.field("text", pa.string()),
            pa.field("none", pa.string()),
            n=7,
            price=decimal.Decimal("1.50"),
            ratio=0.5,
            flag=True,
            data=b"\0x",
            text="it's",
        )
        table.add((3, "c", 7, decimal.Decimal("1.50"), 0.5, True, b"\0x", "it's", None))
        with materializing(lake, endpoint, tmp_path, resource=resource) as materialization:
            once(materialization)
            assert materialization.status().documents == 1
        (one, *others) = columns(tmp_path, "n, price, ratio, flag, data, text, none")
        assert one == (7, "1.50", 0.5, 1, b"\0x", "it's", None)
        assert others == [one, one]


@pytest.mark.parametrize(
    ("connector", "resource", "defect"),
    [
        ("sqlite", {"table": "t", "document": False}, "add_column_without_fill"),
        ("plain-files", {"name": "t"}, "any_layout"),
    ],
)
def test_planted_bug_in_added_default_breaks_equality_with_collection(
    lake: str, tmp_path: Path, connector: str, resource: Mapping[str, Any], defect: str
) -> None:
    expected = [(1, 7), (2, 7), (3, 9)]
    for bug, name in [(None, "clean"), (defect, "planted")]:
        folder = tmp_path / name
        folder.mkdir()
        endpoint = Endpoint(connector, folder)
        with Grown(f"{lake}/{name}", name=pa.string()) as table:
            table.add((1, "a"), (2, "b"))
            bring(f"{lake}/{name}", endpoint, folder, resource=resource)
            table.alter(pa.field("n", pa.int32(), nullable=False), n=7)
            table.add((3, "c", 9))
            with planted(bug):
                bring(f"{lake}/{name}", endpoint, folder, resource=resource)
            assert [(row["id"], row["n"]) for row in table.contents()] == expected
        if connector == "sqlite":
            found = columns(folder, "id, n")
        else:
            found = [(row["id"], row.get("n")) for row in endpoint.rows()]
        assert (found == expected) == (bug is None)
        assert found[2] == expected[2]


def test_added_column_that_already_exists_in_table_is_rewritten(lake: str, tmp_path: Path) -> None:
    resource = {"table": "t", "document": False}
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"))
        bring(lake, endpoint, tmp_path, resource=resource)
        with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
            database.execute("ALTER TABLE t ADD COLUMN n ANY")
            database.execute("UPDATE t SET n = 3")
            database.commit()
        table.alter(pa.field("n", pa.int32(), nullable=False), n=7)
        table.add((2, "b", 9))
        bring(lake, endpoint, tmp_path, resource=resource)
    assert columns(tmp_path, "id, n") == [(1, 7), (2, 9)]


def test_backfill_replaces_all_rows_and_removes_foreign_rows_only_with_allow_drop(
    lake: str, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path)
        with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
            database.execute("INSERT INTO t VALUES (9, 'foreign', '{}')")
            database.commit()
        with (
            materializing(lake, endpoint, tmp_path, backfill=1) as refused,
            pytest.raises(UsageError, match="would remove 1 rows") as raised,
        ):
            once(refused)
        assert "--allow-drop" in raised.value.hint
        assert [id for (id,) in columns(tmp_path, "id")] == [1, 2, 9]
        with materializing(lake, endpoint, tmp_path, backfill=1, allow_drop=True) as allowed:
            once(allowed)
        assert endpoint.rows() == table.contents()


def test_backfill_with_planned_transaction_keeps_foreign_rows(lake: str, tmp_path: Path) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path)
        with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
            database.execute("INSERT INTO t VALUES (9, 'foreign', '{}')")
            database.commit()
        table.add((3, "c"), (4, "d"))
        with armed(Failpoint.PLAN_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            bring(lake, endpoint, tmp_path)
        with pytest.raises(ForeignRows, match="would remove 1 rows"):
            bring(lake, endpoint, tmp_path, backfill=1)
        assert [id for (id,) in columns(tmp_path, "id")] == [1, 2, 9]


def test_backfill_after_commit_not_recorded_treats_no_row_as_foreign(
    lake: str, tmp_path: Path
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"))
        bring(lake, endpoint, tmp_path)
        table.add((2, "b"), (3, "c"))
        with armed(Failpoint.STORE_DONE, Action.ERROR), pytest.raises(IndeterminateError):
            bring(lake, endpoint, tmp_path)
        bring(lake, endpoint, tmp_path, backfill=1)
        assert endpoint.rows() == table.contents()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"delta_updates": True, "delete": "ignore"}, {}),
        ({"delete": "ignore"}, {}),
        ({"delete": "soft"}, {"delete": "hard"}),
    ],
    ids=["delta", "ignore", "soft"],
)
def test_backfill_does_not_treat_rows_of_earlier_settings_as_foreign(
    lake: str, tmp_path: Path, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    endpoint = Endpoint("sqlite", tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"))
        bring(lake, endpoint, tmp_path, **before)
        table.update([(1, "a", -1), (2, "b", -1), (2, "c", 1)])
        bring(lake, endpoint, tmp_path, **before)
        bring(lake, endpoint, tmp_path, **{**before, **after}, backfill=1)
        assert endpoint.rows() == table.contents()


@pytest.mark.parametrize("connector", ALL)
@pytest.mark.parametrize("step", STEPS)
def test_backfill_after_crash_at_each_step_equals_collection(
    lake: str, tmp_path: Path, connector: str, step: Failpoint
) -> None:
    endpoint = Endpoint(connector, tmp_path)
    with Grown(lake, name=pa.string()) as table:
        table.add((1, "a"), (2, "b"), (3, "c"))
        bring(lake, endpoint, tmp_path)
        table.update([(3, "c", -1)])
        with (
            materializing(lake, endpoint, tmp_path, backfill=1) as materialization,
            armed(step, Action.ERROR),
            pytest.raises(IndeterminateError),
        ):
            once(materialization)
        table.update([(1, "a", -1), (4, "d", 1)])
        bring(lake, endpoint, tmp_path, backfill=1)
        assert endpoint.rows() == table.contents()


@pytest.mark.parametrize("document", [True, False])
def test_source_column_called_flow_document_keeps_its_name(
    lake: str, tmp_path: Path, document: bool
) -> None:
    resource = {"table": "t", "document": document}
    with Grown(lake, flow_document=pa.string()) as table:
        table.add((1, "a"), (2, None))
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, resource=resource)
        table.update([(1, "a", -1), (1, "b", 1)])
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, resource=resource)
        assert columns(tmp_path, "id, flow_document") == [(1, "b"), (2, None)]
        if document:
            documents = [json.loads(each) for (each,) in columns(tmp_path, "flow_document1")]
            assert documents == table.contents()


@pytest.mark.parametrize(
    ("decimals", "stored", "matching"), [("text", "100.50", []), ("real", 100.5, [1])]
)
def test_sqlite_stores_decimals_in_configured_format(
    lake: str, tmp_path: Path, decimals: str, stored: object, matching: list[int]
) -> None:
    endpoint = {"path": str(tmp_path / "t.db"), "decimals": decimals}
    with Grown(lake, amount=pa.decimal128(10, 2)) as table:
        table.add((1, decimal.Decimal("100.50")), (2, decimal.Decimal("9.95")), (3, None))
        section = {"endpoint": endpoint}
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, section=section)
        assert columns(tmp_path, "id, amount")[0] == (1, stored)
        with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as database:
            limit = 99 if decimals == "real" else "99.00"
            larger = database.execute("SELECT id FROM t WHERE amount > ?", [limit]).fetchall()
        assert [id for (id,) in larger] == matching
        other = {**endpoint, "decimals": "real" if decimals == "text" else "text"}
        changed: Mapping[str, Any] = {"section": {"endpoint": other}}
        for backfill, hint in [
            (0, "Set backfill: 1 in the binding and run with --allow-drop"),
            (1, "Run with --allow-drop"),
        ]:
            with pytest.raises(
                IncompatibleResource,
                match=r'collection "shop.t" in resource t: column "amount" is',
            ) as raised:
                bring(lake, Endpoint("sqlite", tmp_path), tmp_path, backfill=backfill, **changed)
            assert hint in raised.value.hint
            assert "It holds 3 rows." in raised.value.detail
            assert columns(tmp_path, "id, amount")[0] == (1, stored)
        allowed = {**changed, "backfill": 1, "allow_drop": True}
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, **allowed)
        now = [100.5, 9.95, None] if decimals == "text" else ["100.50", "9.95", None]
        assert columns(tmp_path, "amount") == [(each,) for each in now]
        # Now the resource is compatible.
        bring(lake, Endpoint("sqlite", tmp_path), tmp_path, backfill=1, **changed)


def test_plan_reports_replaced_and_rewritten_rows(lake: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"

    def write(backfill: int, decimals: str = "text") -> None:
        file.write_text(
            f"location: {lake}\nwriter: w\nmaterializations:\n  local:\n    connector: sqlite\n"
            f"    endpoint: {{path: {tmp_path}/t.db, decimals: {decimals}}}\n    bindings:\n"
            f"      - {{collection: shop.t, resource: {{table: t}}, backfill: {backfill}}}\n"
        )

    def planned_changes() -> str:
        return "\n".join(map(str, plan_file(file)))

    with Grown(lake, amount=pa.decimal128(10, 2)) as table:
        table.add((1, decimal.Decimal("1.50")), (2, decimal.Decimal("2.50")))
        write(0)
        assert 'column "amount" of table "t" stores decimals as text' in planned_changes()
        materialize.run(file, jobs=materialize.LocalRunner(), once=True)
        write(1)
        assert "resource t: 2 rows are replaced" in planned_changes()
        write(1, "real")
        found = planned_changes()
        assert "resource t: drop and re-create with 2 rows in it, which needs --allow-drop" in found
        assert 'in the first transaction: DROP TABLE IF EXISTS "t"' in found
        write(0, "real")
        assert "cannot store collection" in planned_changes()
        write(0)
        table.alter(pa.field("n", pa.int32(), nullable=False), n=7)
        table.add((3, None, 8))
        found = planned_changes()
        assert "resource t: all rows are stored again, to change flow_document" in found
        assert "ADD COLUMN" in found
        assert "DEFAULT 7" in found
