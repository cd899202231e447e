"""SQLite connector: exact values, and a lock held only during commit."""

import base64
import json
import math
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.connectors.sqlite import SqliteConnector, session, transactor
from penstock.connectors.sqlite.session import SqliteSession
from penstock.data.packed import pack_row
from penstock.errors import Fenced, TransientError, UsageError
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.key_range import WHOLE
from penstock.protocol.messages import START_FROM_ZERO
from penstock.protocol.specs import (
    CollectionSpec,
    ConstraintType,
    Exists,
    FieldSelection,
    Inference,
    MaterializationBinding,
    MaterializationSpec,
    Projection,
    StringInference,
)
from penstock.sdk import (
    ApplyRequest,
    Documents,
    Keys,
    OpenRequest,
    Refused,
    RequestedBinding,
    ValidateRequest,
)
from penstock.sdk.bindings import bind, projected
from penstock.sdk.config import parse
from penstock.sdk.sql.connector import SqlResource

KINDS: dict[str, Inference] = {
    "id": Inference(("integer",), exists=Exists.MUST),
    "a_boolean": Inference(("boolean",), exists=Exists.MAY),
    "an_integer": Inference(("integer",), exists=Exists.MAY),
    "a_number": Inference(("number", "null"), exists=Exists.MUST),
    "a_string": Inference(("string",), exists=Exists.MAY),
    "bytes": Inference(("string",), StringInference(content_encoding="base64"), exists=Exists.MAY),
    "an_object": Inference(("object",), exists=Exists.MAY),
    "in/side": Inference(("string",), exists=Exists.MAY),
}


class Target:
    """Table of one SQLite file, bound as a runtime binds it."""

    def __init__(self, path: Path, resource: dict[str, Any] | None = None, **fields: Inference):
        self.endpoint = SqliteConnector.endpoint(path=path)
        self.connector = SqliteConnector()
        self.resource = SqlResource.model_validate({"table": "t", **(resource or {})})
        self.fields = {"id": KINDS["id"], **fields}
        self.version = "v"
        self.keys: tuple[str, ...] = ("id",)

    @property
    def collection(self) -> CollectionSpec:
        document = Projection("", "flow_document", inference=Inference(("object",)))
        return CollectionSpec(
            "a/b",
            tuple("/" + name for name in self.keys),
            (document, *(Projection("/" + n, n, inference=i) for n, i in self.fields.items())),
        )

    @property
    def spec(self) -> MaterializationSpec:
        values = tuple(sorted({*self.fields} - {*self.keys}))
        document = "flow_document" if self.resource.document else ""
        return MaterializationSpec(
            "m",
            "{}",
            (
                MaterializationBinding(
                    self.resource.model_dump_json(),
                    ("t",),
                    self.collection,
                    FieldSelection(self.keys, values, document),
                    self.resource.delta_updates,
                ),
            ),
        )

    @property
    def bindings(self):
        return [bind(0, self.spec.bindings[0], self.resource)]

    def validate(self):
        requested_binding = RequestedBinding(
            self.resource, self.collection, projected(self.collection, {})
        )
        [validated] = self.connector.validate(
            ValidateRequest("m", self.endpoint, [requested_binding])
        )
        return validated

    def apply(self, *, dry_run: bool = False) -> str:
        return self.connector.apply(
            ApplyRequest("m", self.version, self.endpoint, self.bindings, dry_run, self.spec)
        )

    def open(self, key_range=WHOLE):
        return self.connector.open(
            OpenRequest("m", self.version, self.endpoint, self.bindings, key_range, {})
        )

    def documents(
        self, *rows: dict[str, Any], exists: bool = False, deleted_ids: tuple[int, ...] = ()
    ):
        [binding] = self.bindings

        def packed(names: Any) -> pa.BinaryArray:
            return pa.array(
                [pack_row([_element(row.get(name)) for name in names]) for row in rows],
                pa.binary(),
            )

        return Documents(
            binding,
            packed(self.keys),
            packed(sorted({*self.fields} - {*self.keys})),
            pa.array([json.dumps(row).encode() for row in rows], pa.binary()),
            pa.array([exists] * len(rows)),
            pa.array([row["id"] in deleted_ids for row in rows]) if deleted_ids else None,
        )

    def commit(self, stream, *batches: Documents, checkpoint: bytes = b"cp") -> None:
        stream.store(iter(batches))
        stream.start_commit(checkpoint)

    def load(self, stream, *keys_to_load: Any) -> list[Any]:
        [binding] = self.bindings
        tuples = [key if isinstance(key, tuple) else (key,) for key in keys_to_load]
        keys = Keys(binding, pa.array([pack_row(key) for key in tuples], pa.binary()))
        return [
            json.loads(doc)
            for response in stream.load(iter([keys]))
            for doc in response.docs_json.to_pylist()
        ]

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.endpoint.path) as connection:
            rows = connection.execute(f"SELECT {columns} FROM t ORDER BY id").fetchall()
        connection.close()
        return rows


def _element(value: Any) -> Any:
    return json.dumps(value).encode() if isinstance(value, dict | list) else value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "target.db"


def test_sqlite_stores_updates_and_deletes_rows(path):
    target = Target(path, a_string=KINDS["a_string"])
    target.apply()
    stream = target.open()
    first: list[dict[str, Any]] = [
        {"id": 1, "a_string": "a"},
        {"id": 2, "a_string": "b"},
        {"id": 3},
    ]
    target.commit(stream, target.documents(*first))
    assert target.load(stream, 3, 1, 7) == [first[2], first[0]]
    # `exists` is only a hint, and wrong in this case.
    target.commit(stream, target.documents({"id": 1, "a_string": "c"}, {"id": 4}))
    target.commit(stream, target.documents({"id": 2}, {"id": 3, "a_string": "d"}, deleted_ids=(2,)))
    assert target.rows("id, a_string") == [(1, "c"), (3, "d"), (4, None)]
    stream.close()
    assert target.open().checkpoint == b"cp"


def test_soft_deleted_rows_are_marked_and_not_loaded(path):
    target = Target(path, {"delete": "soft"}, a_string=KINDS["a_string"])
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "a_string": "a"}, {"id": 2}))
    target.commit(stream, target.documents({"id": 1}, deleted_ids=(1,)))
    assert target.rows("id, a_string, flow_deleted") == [(1, "a", 1), (2, None, 0)]
    assert target.load(stream, 1, 2) == [{"id": 2}]
    target.commit(stream, target.documents({"id": 1, "a_string": "b"}))
    assert target.rows("id, a_string, flow_deleted")[0] == (1, "b", 0)


def test_truncating_store_and_new_rows_commit_in_one_transaction(path, monkeypatch):
    monkeypatch.setattr(transactor, "WAITING_BYTES", 0)  # Everything spills to a file.
    target = Target(path, {"delete": "soft"}, a_string=KINDS["a_string"])
    assert target.validate().accepts_empty
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "a_string": "a"}, {"id": 2}))
    emptying = replace(target.documents(), empties=True)
    stream.store(iter([emptying, target.documents({"id": 2, "a_string": "b"}, {"id": 3})]))
    assert target.rows("id, flow_deleted") == [(1, 0), (2, 0)]
    stream.start_commit(b"cp")
    marked = [(1, "a", 1), (2, "b", 0), (3, None, 0)]
    assert target.rows("id, a_string, flow_deleted") == marked
    target.commit(stream, target.documents({"id": 4}))
    assert target.rows("id, a_string, flow_deleted") == [*marked, (4, None, 0)]


def test_delta_updates_append_rows_and_reject_deletes(path):
    target = Target(path, {"delta_updates": True}, an_integer=KINDS["an_integer"])
    assert target.validate().delta_updates
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "an_integer": 1}))
    target.commit(stream, target.documents({"id": 1, "an_integer": 2}))
    assert target.rows("id, an_integer") == [(1, 1), (1, 2)]
    stream.store(iter([target.documents({"id": 1}, deleted_ids=(1,))]))
    with pytest.raises(RemoteProtocolError, match='deletes from table "t"'):
        stream.start_commit(b"cp")


odd_numbers = st.sampled_from(
    [-0.0, 5e-324, 1.7976931348623157e308, 0.1, 1e22, math.inf, -math.inf]
)
rows = st.fixed_dictionaries(
    {"id": st.integers(-(2**63), 2**63 - 1), "a_number": st.floats(allow_nan=False) | odd_numbers},
    optional={
        "a_boolean": st.booleans(),
        "an_integer": st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**70), 2**70),
        "a_string": st.text(),
        "bytes": st.binary().map(lambda value: base64.b64encode(value).decode()),
        "an_object": st.dictionaries(st.text(max_size=3), st.none() | st.integers(), max_size=3),
        "in/side": st.text(max_size=5),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(documents=st.lists(rows, max_size=8, unique_by=lambda row: row["id"]))
def test_values_round_trip_through_columns(tmp_path_factory, documents):
    """Documents are assembled from columns: the table has no document column."""
    target = Target(
        tmp_path_factory.mktemp("values") / "x.db",
        {"document": False},
        **{name: kind for name, kind in KINDS.items() if name != "id"},
    )
    target.apply()
    stream = target.open()
    target.commit(stream, *([target.documents(*documents)] if documents else []))
    loaded = {row["id"]: row for row in target.load(stream, *(row["id"] for row in documents))}
    stream.close()
    assert len(loaded) == len(documents)
    for row in documents:
        back = loaded[row["id"]]
        inside = back.pop("in", None)
        if inside is not None:
            back["in/side"] = inside["side"]
        number = back["a_number"]
        back["a_number"] = float(number) if isinstance(number, str) else number
        assert back == row
        assert math.copysign(1, back["a_number"]) == math.copysign(1, row["a_number"])
        assert type(back.get("an_integer")) is type(row.get("an_integer"))


def test_nan_and_integers_beyond_64_bits_are_stored_as_text(path):
    target = Target(path, {"document": False}, n=KINDS["a_number"], i=KINDS["an_integer"])
    target.apply()
    stream = target.open()
    target.commit(
        stream,
        target.documents(
            {"id": 1, "n": math.nan, "i": 2**64},
            {"id": 2, "n": math.inf, "i": 2**53 + 1},
        ),
    )
    assert target.rows("i, n, typeof(i), typeof(n)") == [
        (str(2**64), "NaN", "text", "text"),
        (2**53 + 1, math.inf, "integer", "real"),
    ]
    assert target.load(stream, 1, 2) == [
        {"id": 1, "n": "NaN", "i": 2**64},
        {"id": 2, "n": "Infinity", "i": 2**53 + 1},
    ]


def test_integers_that_fit_64_bits_are_stored_as_integers_next_to_larger_ones(path):
    target = Target(path, {"document": False}, i=KINDS["an_integer"])
    target.apply()
    stream = target.open()
    values = [2**64, 2**63, 2**63 - 1, -(2**63), -(2**63) - 1, 0, -1_000, None]
    rows = [{"id": i} | ({} if v is None else {"i": v}) for i, v in enumerate(values)]
    target.commit(stream, target.documents(*rows))
    stored = [v if v is None or -(2**63) <= v < 2**63 else str(v) for v in values]
    assert [row for (row,) in target.rows("i")] == stored
    assert target.load(stream, *range(len(values))) == rows


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, None),
        ("7", 7),
        ("0.5", 0.5),
        ("-inf", -math.inf),
        ("NaN", "NaN"),
        *((str(integer), integer) for integer in (-(2**63), 2**63 - 1)),
        *((str(integer), str(integer)) for integer in (-(2**63) - 1, 2**63)),
    ],
)
def test_number_as_text_is_stored_as_a_number_if_sqlite_has_it(text, value):
    number = transactor._number(text)
    assert (number, type(number)) == (value, type(value))


def test_rows_with_a_key_of_two_columns_are_loaded_updated_and_deleted(path):
    target = Target(path, a_string=KINDS["a_string"], an_integer=KINDS["an_integer"])
    target.keys = ("id", "a_string")
    target.apply()
    stream = target.open()
    first = [{"id": i, "a_string": s, "an_integer": 0} for i in (1, 2) for s in ("a", "b")]
    target.commit(stream, target.documents(*first))
    assert target.load(stream, (1, "b"), (2, "a"), (2, "c"), (3, "a")) == first[1:3]
    # The keys of the previous load are dropped.
    assert target.load(stream, (1, "a")) == first[:1]
    update = {"id": 1, "a_string": "b", "an_integer": 7}
    target.commit(stream, target.documents(update))
    deletes = target.documents({"id": 2, "a_string": "a"}, deleted_ids=(2,))
    target.commit(stream, deletes)
    assert target.rows("id, a_string, an_integer") == [(1, "a", 0), (1, "b", 7), (2, "b", 0)]
    stream.close()


def test_rows_whose_text_key_has_a_nul_are_loaded(path):
    target = Target(path, name=KINDS["a_string"])
    target.keys = ("name",)
    target.apply()
    stream = target.open()
    documents = [{"id": i, "name": name} for i, name in enumerate(("a\0b", "a", 'é"\\'))]
    target.commit(stream, target.documents(*documents))
    assert target.load(stream, "a\0b", "none") == documents[:1]
    assert target.load(stream, "a") == documents[1:2]
    assert target.load(stream, 'é"\\') == documents[2:]
    stream.close()


def test_load_of_a_row_without_a_document_raises_refused(path):
    target = Target(path)
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}, {"id": 2}))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE t SET flow_document = NULL WHERE id = 1")
    connection.close()
    assert target.load(stream, 2) == [{"id": 2}]
    with pytest.raises(Refused, match='table "t" has a row without a document'):
        target.load(stream, 1, 2)
    stream.close()


def test_integer_key_beyond_64_bits_raises_refused(path):
    target = Target(path)
    target.apply()
    stream = target.open()
    stream.store(iter([target.documents({"id": 2**64})]))
    with pytest.raises(Refused, match='could not store a document in table "t"'):
        stream.start_commit(b"cp")
    stream.close()
    assert target.rows() == []


# Locks.


def test_load_and_store_do_not_lock_the_database(path):
    target = Target(path, a_string=KINDS["a_string"])
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}))
    loading = stream.load(iter([Keys(target.bindings[0], pa.array([pack_row((1,))]))]))
    next(loading)
    stream.store(iter([target.documents({"id": 2})]))
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("COMMIT")
    connection.close()
    stream.start_commit(b"cp")
    assert [row[0] for row in target.rows("id")] == [1, 2]


def test_large_transaction_spills_to_file_without_locking_the_database(path, monkeypatch):
    monkeypatch.setattr(transactor, "WAITING_BYTES", 300)
    target = Target(path, a_string=KINDS["a_string"])
    target.apply()
    stream = target.open()
    many = [target.documents({"id": key, "a_string": "x" * 90}) for key in range(9)]
    stream.store(iter(many))
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("COMMIT")
    connection.close()
    assert target.rows() == []
    stream.close()
    assert [file.name for file in path.parent.iterdir()] == ["target.db"]
    assert target.rows() == []
    again = target.open()
    target.commit(again, *many)
    target.commit(
        again,
        *(target.documents({"id": key}, deleted_ids=(key,)) for key in (0, 2, 4)),
        *(target.documents({"id": key, "a_string": "y" * 200}) for key in (1, 3)),
        target.documents({"id": 9}),
    )
    again.close()
    expected = {1: "y" * 200, 3: "y" * 200, **dict.fromkeys(range(5, 9), "x" * 90), 9: None}
    assert dict(target.rows("id, a_string")) == expected


def test_cancelled_commit_changes_nothing(path):
    target = Target(path)
    target.apply()
    stream = target.open()
    stream.store(iter([target.documents({"id": 1})]))
    stream.cancel()
    with pytest.raises(Exception, match="was cancelled"):
        stream.start_commit(b"cp")
    stream.close()
    assert target.rows() == []


def test_commit_of_fenced_stream_raises_fenced_and_stores_nothing(path):
    target = Target(path)
    target.apply()
    older = target.open()
    target.commit(older, target.documents({"id": 1}), checkpoint=b"one")
    older.store(iter([target.documents({"id": 2})]))
    newer = target.open()
    assert newer.checkpoint == b"one"
    with pytest.raises(Fenced, match='stream of materialization "m" 00000000-ffffffff is fenced'):
        older.start_commit(b"two")
    target.commit(newer, target.documents({"id": 3}), checkpoint=b"three")
    assert [row[0] for row in target.rows("id")] == [1, 3]


def test_planted_bug_without_commit_fence_stores_rows_of_fenced_stream(path, monkeypatch):
    """Plant the bug that fences prevent."""
    target = Target(path)
    target.apply()
    older = target.open()
    older.store(iter([target.documents({"id": 2})]))
    target.commit(target.open(), target.documents({"id": 3}), checkpoint=b"three")
    monkeypatch.setattr(transactor, "commit_fence", lambda *_: None)
    older.start_commit(b"two")
    assert [row[0] for row in target.rows("id")] == [2, 3]


def test_interrupted_wait_for_write_lock_raises(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    session = SqliteSession(path)
    session.interrupt()
    with pytest.raises(Exception, match="was cancelled"):
        session.begin()
    connection.close()


# Apply.


def test_full_disk_is_a_transient_error(path):
    full = SqliteSession(path)
    full.run("CREATE TABLE t (a BLOB)")
    full.run("PRAGMA max_page_count = 3")
    with pytest.raises(TransientError, match="database or disk is full"):
        full.run("INSERT INTO t VALUES (zeroblob(100000))")
    full.close()


def test_apply_dry_run_creates_nothing_and_second_apply_is_empty(path):
    target = Target(path)
    description = target.apply(dry_run=True)
    target.validate()
    assert not path.exists()
    assert 'CREATE TABLE "t"' in description
    assert target.apply() == description
    assert target.apply() == ""
    assert target.apply(dry_run=True) == ""


def test_apply_with_added_and_removed_fields_keeps_stored_values(path):
    target = Target(path, a_string=Inference(("string",), exists=Exists.MUST))
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "a_string": "a"}))
    stream.close()
    target.fields = {"id": KINDS["id"], "another": KINDS["an_integer"]}
    target.version = "v2"
    description = target.apply()
    assert '"another" ANY' in description
    stream = target.open()
    target.commit(stream, target.documents({"id": 2, "another": 5}))
    assert target.rows("id, a_string, another") == [(1, "a", None), (2, None, 5)]


def test_number_column_changed_to_string_keeps_values_as_json_text(path):
    """A value loaded as a number before the change is loaded as its JSON text after it."""
    numbers = [0.1, 1 / 3, 5.0, -1e22, 2**53 + 1, 2**70, math.nan, math.inf, -math.inf]
    target = Target(path, {"document": False}, x=Inference(("number",), exists=Exists.MAY))
    target.apply()
    stream = target.open()
    target.commit(
        stream, *(target.documents({"id": key, "x": number}) for key, number in enumerate(numbers))
    )
    before = [row["x"] for row in target.load(stream, *range(len(numbers)))]
    stream.close()
    target.fields["x"] = Inference(("string",), exists=Exists.MAY)
    assert target.validate().constraints["x"].type is ConstraintType.FIELD_REQUIRED
    target.version = "v2"
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 99, "x": "007"}))
    after = [row["x"] for row in target.load(stream, *range(len(numbers)), 99)]
    stream.close()
    assert after.pop() == "007"
    assert after == [value if isinstance(value, str) else json.dumps(value) for value in before]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a_boolean", "a_string"),
        ("a_boolean", "an_integer"),
        ("a_number", "an_object"),
        ("a_string", "an_object"),
        ("an_object", "a_string"),
    ],
)
def test_type_change_that_alters_values_is_rejected(path, before, after):
    target = Target(path, {"document": False}, x=KINDS[before])
    target.apply()
    target.fields["x"], target.version = KINDS[after], "v2"
    assert target.validate().constraints["x"].type is ConstraintType.UNSATISFIABLE
    with pytest.raises(Refused, match='column "x" of table "t" is'):
        target.apply()


def test_string_column_changed_to_integer_is_rejected(path):
    target = Target(path, x=KINDS["a_string"])
    target.apply()
    target.fields["x"] = KINDS["an_integer"]
    target.version = "v2"
    constraint = target.validate().constraints["x"]
    assert constraint.type is ConstraintType.UNSATISFIABLE
    assert 'column "x" is TEXT' in constraint.reason
    with pytest.raises(Refused, match='column "x" of table "t" is TEXT, not ANY'):
        target.apply()


def test_switch_to_delta_updates_is_accepted_and_switch_back_rejected(path):
    target = Target(path, x=KINDS["a_string"])
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "x": "a"}))
    stream.close()
    target.resource = SqlResource(table="t", delta_updates=True)
    target.version = "v2"
    target.validate()
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "x": "b"}))
    stream.close()
    assert target.rows("id, x") == [(1, "a"), (1, "b")]
    target.resource = SqlResource(table="t")
    target.version = "v3"
    with pytest.raises(Refused, match="from delta updates to standard updates is not allowed"):
        target.validate()
    with pytest.raises(Refused, match="from delta updates to standard updates is not allowed"):
        target.apply()


def test_foreign_table_is_rejected_without_adopt_option(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY) STRICT")
    connection.close()
    target = Target(path)
    with pytest.raises(Refused, match="this materialization did not create it"):
        target.validate()
    with pytest.raises(Refused, match="this materialization did not create it"):
        target.apply()
    target.resource = SqlResource(table="t", adopt=True)
    target.validate()
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}))
    assert target.rows("id") == [(1,)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("(id TEXT PRIMARY KEY)", 'table "t" cannot be adopted: it is not STRICT'),
        ("(id TEXT COLLATE NOCASE PRIMARY KEY) STRICT", 'key column "id" is NOCASE'),
        (
            "(id TEXT, PRIMARY KEY (id COLLATE RTRIM)) STRICT, WITHOUT ROWID",
            'key column "id" is RTRIM',
        ),
    ],
    ids=["not strict", "without case", "without rowid"],
)
def test_adopt_of_non_strict_or_collated_table_is_rejected(path, table, message):
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE T {table}")
    connection.close()
    target = Target(path, {"adopt": True, "document": False})
    target.fields["id"] = Inference(("string",), exists=Exists.MUST)
    for call in (target.validate, target.apply):
        with pytest.raises(Refused, match=message) as caught:
            call()
        assert "use another one" in caught.value.hint


@pytest.mark.parametrize("column", ["x ANY", "other TEXT NOT NULL DEFAULT 'o'"])
def test_change_that_replaces_adopted_table_is_rejected(path, column):
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, {column} UNIQUE) STRICT")
    connection.close()
    target = Target(path, {"adopt": True, "document": False}, x=KINDS["a_string"])
    with pytest.raises(Refused, match=r'table "t" would have to be replaced to change (x|other),'):
        target.apply()


def test_change_that_replaces_table_adopted_by_earlier_spec_is_rejected(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x ANY UNIQUE) STRICT")
    connection.close()
    target = Target(path, {"adopt": True, "document": False}, x=KINDS["an_integer"])
    target.apply()
    target.resource, target.version = SqlResource(table="t", document=False), "v2"
    target.fields["y"] = KINDS["a_string"]
    target.apply()
    target.fields["x"], target.version = KINDS["a_string"], "v3"
    with pytest.raises(Refused, match="would have to be replaced to change x,"):
        target.apply()


def test_columns_that_differ_only_in_case_conflict(path):
    target = Target(path, x=KINDS["a_string"], X=KINDS["a_string"], Ä=KINDS["a_string"])
    target.fields["ä"] = KINDS["a_string"]
    constraints = target.validate().constraints
    assert constraints["X"].type is ConstraintType.FIELD_FORBIDDEN
    assert constraints["X"].reason == 'column "X" is used by field "x"'
    assert {constraints[name].type for name in "xÄä"} == {ConstraintType.LOCATION_RECOMMENDED}
    with pytest.raises(Refused, match="would be the same column"):
        target.apply()
    del target.fields["X"]
    target.apply()
    # The field that has the column keeps it.
    target.fields = {"id": KINDS["id"], "X": KINDS["a_string"], "x": KINDS["a_string"]}
    constraints = target.validate().constraints
    assert constraints["x"].type is ConstraintType.FIELD_REQUIRED
    assert constraints["X"].type is ConstraintType.FIELD_FORBIDDEN


def test_existing_columns_are_matched_case_insensitively(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE T (ID INTEGER PRIMARY KEY, Name TEXT) STRICT")
    connection.close()
    target = Target(path, {"adopt": True, "document": False}, name=KINDS["a_string"])
    constraints = target.validate().constraints
    assert constraints["id"].type is ConstraintType.FIELD_REQUIRED
    target.apply()
    assert target.apply() == ""
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}))
    assert target.load(stream, 1) == [{"id": 1}]
    stream.close()


def test_tables_that_differ_only_in_case_are_duplicate_bindings(path):
    target = Target(path)
    fields = projected(target.collection, {})
    tables = [SqlResource(table=name) for name in ("Orders", "orders")]
    requested_bindings = [
        RequestedBinding(resource, target.collection, fields) for resource in tables
    ]
    with pytest.raises(Refused, match='duplicate binding: table "Orders"'):
        target.connector.validate(ValidateRequest("m", target.endpoint, requested_bindings))


@pytest.mark.parametrize("name", ["", ":memory:"])
def test_endpoint_path_that_is_no_file_raises_usage_error(name):
    with pytest.raises(UsageError, match=r"path: .*must be a file"):
        parse(SqliteConnector.endpoint, json.dumps({"path": name}), "endpoint")


def test_file_that_is_no_sqlite_database_raises_refused(tmp_path):
    path = tmp_path / "text"
    path.write_text("hello\n" * 100)
    with pytest.raises(Refused, match="could not open SQLite database"):
        Target(path).validate()
    with pytest.raises(Refused, match="could not open SQLite database"):
        Target(tmp_path / "no" / "folder.db").apply()


def test_applied_spec_does_not_contain_endpoint_config(path):
    target = Target(path)
    target.apply()
    with sqlite3.connect(path) as connection:
        [(spec,)] = connection.execute("SELECT spec FROM flow_materializations_v2")
    connection.close()
    assert b"target.db" not in base64.b64decode(spec)


def test_apply_with_several_changes_keeps_rows_indexes_and_views(path):
    target = Target(
        path,
        a=Inference(("string",), exists=Exists.MUST),
        b=Inference(("integer",), exists=Exists.MUST),
    )
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "a": "x", "b": 5}))
    stream.close()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE INDEX by_b ON t (b)")
        connection.execute("CREATE VIEW seen AS SELECT b FROM t")
    connection.close()
    # Remove a field, add a field, change a type to optional text, and drop the primary key.
    target.resource = SqlResource(table="t", delta_updates=True)
    target.fields = {"id": KINDS["id"], "b": KINDS["a_string"], "c": KINDS["a_boolean"]}
    target.version = "v2"
    target.apply()
    assert target.apply() == ""
    stream = target.open()
    target.commit(stream, target.documents({"id": 1, "c": True}, {"id": 1, "b": "6"}))
    stream.close()
    assert target.rows("id, a, b, c") == [
        (1, "x", "5", None),
        (1, None, None, 1),
        (1, None, "6", None),
    ]
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(b) FROM seen").fetchall() == [(2,)]
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")
        assert ("by_b",) in names.fetchall()
    connection.close()


def test_switch_to_hard_deletes_removes_soft_deleted_rows(path):
    target = Target(path, {"delete": "soft"})
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}, {"id": 2}))
    target.commit(stream, target.documents({"id": 1}, deleted_ids=(1,)))
    stream.close()
    target.resource, target.version = SqlResource(table="t"), "v2"
    target.apply()
    stream = target.open()
    assert target.load(stream, 1, 2) == [{"id": 2}]
    target.commit(stream, target.documents({"id": 1}))
    assert target.load(stream, 1) == [{"id": 1}]


def test_older_stream_is_fenced_after_delete_and_recreation(path):
    target = Target(path)
    target.apply()
    older = target.open()
    applying = ApplyRequest("m", "v", target.endpoint, target.bindings, False, target.spec)
    target.connector.delete(applying)
    target.apply()
    newer = target.open()
    assert newer.checkpoint == START_FROM_ZERO
    older.store(iter([target.documents({"id": 1})]))
    with pytest.raises(Fenced):
        older.start_commit(b"old")


@pytest.mark.parametrize("wrong", ["-_-_", "SGVs bG8=!!", "abc"])
def test_bytes_that_are_not_base64_are_rejected(path, wrong):
    target = Target(path, bytes=KINDS["bytes"])
    target.apply()
    stream = target.open()
    stream.store(iter([target.documents({"id": 1, "bytes": wrong})]))
    with pytest.raises(RemoteProtocolError, match="not base64"):
        stream.start_commit(b"cp")


def deleted(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("harm", [deleted, replaced])
@pytest.mark.parametrize("file", ["target.db", "target.db-wal"])
def test_commit_to_deleted_or_replaced_file_raises_refused(path, harm, file):
    target = Target(path)
    target.apply()
    stream = target.open()
    target.commit(stream, target.documents({"id": 1}))
    stream.store(iter([target.documents({"id": 2})]))
    harm(path.with_name(file))
    with pytest.raises(Refused, match=f'{file}" was (deleted|replaced)') as refused:
        stream.start_commit(b"lost")
    assert "backfill" in refused.value.hint
    stream.close()


def test_commit_to_folder_that_was_replaced_by_a_file_raises_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "target.db"
    target = Target(path)
    target.apply()
    stream = target.open()
    stream.store(iter([target.documents({"id": 1})]))
    path.parent.rename(tmp_path / "moved")
    path.parent.write_text("a file in the place of the folder")
    with pytest.raises(Refused, match=r'target\.db" was deleted while it was open'):
        stream.start_commit(b"lost")
    stream.close()


def test_commit_with_file_deleted_during_commit_raises_refused(path, monkeypatch):
    target = Target(path)
    target.apply()
    stream = target.open()
    stream.store(iter([target.documents({"id": 1})]))
    check_files = SqliteSession.check_files

    def checked(session: SqliteSession) -> None:
        check_files(session)
        session.path.unlink(missing_ok=True)

    monkeypatch.setattr(SqliteSession, "check_files", checked)
    with pytest.raises(Refused, match="was deleted while it was open"):
        stream.start_commit(b"lost")
    stream.close()


COMMITS = """
import os, sys
from pathlib import Path
from tests.connectors.test_sqlite import Target

target = Target(Path(sys.argv[1]))
target.apply()
stream = target.open()
target.commit(stream, target.documents({"id": 1}))
stream.store(iter([target.documents({"id": 2})]))
os.write(1, b"commits")
stream.start_commit(b"cp")
os.write(1, b"acknowledges")
stream.close()
"""


def test_commit_is_synced_before_it_is_acknowledged(path, strace):
    """Without the last sync of the -wal file, a power failure loses the commit."""
    calls = path.with_name("calls")
    subprocess.run(
        [
            *(strace, "-f", "-qq", "-y", "-o", str(calls)),
            *("-e", "trace=write,pwrite64,fsync,fdatasync"),
            *(sys.executable, "-c", COMMITS, str(path)),
        ],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    lines = calls.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if '"commits"' in line)
    end = next(index for index, line in enumerate(lines) if '"acknowledges"' in line)
    of_wal = [line for line in lines[start:end] if "target.db-wal>" in line]
    assert any("pwrite64(" in line for line in of_wal), lines[start:end]
    assert "sync(" in of_wal[-1], of_wal[-1]


def test_connection_has_synchronous_full(path):
    session = SqliteSession(path)
    assert session.query("PRAGMA journal_mode") == [("wal",)]
    assert session.query("PRAGMA synchronous") == [(2,)]
    session.close()


def test_statement_on_locked_file_is_transient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "READ_TIMEOUT_S", 0.01)
    path = tmp_path / "shared.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE t (id)")
    opened = SqliteSession(path, create=False)
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TransientError, match="is locked by another connection"):
        opened.query("SELECT id FROM t")
    with pytest.raises(TransientError, match="is locked by another connection"):
        SqliteSession(path, create=False)
    connection.execute("COMMIT")
    assert opened.query("SELECT id FROM t") == []
    opened.close()
    connection.close()


def test_rejected_statement_names_the_database(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    opened = SqliteSession(path)
    message = f'could not execute statement in SQLite database "{path}": no such table: t'
    with pytest.raises(Refused) as rejected:
        opened.query("SELECT id FROM t")
    assert str(rejected.value) == message
    opened.close()
