"""Guarantees of the three file connectors, over gRPC and across crashes."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.connectors import built_in
from penstock.connectors.files import __main__ as print_command
from penstock.connectors.files.atomic_files import line_of, lines_of, locked, parts_of, replace
from penstock.connectors.files.folder import FilesEndpoint
from penstock.connectors.files.staged_files import StagedFiles, StagedResource
from penstock.data.packed import pack_row
from penstock.errors import PenstockError
from penstock.materialize import connect
from penstock.materialize.connector_client import ConnectorConnection, ConnectorStream
from penstock.materialize.errors import ConnectorError
from penstock.protocol.connector_state import EMPTY, combine_state
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Apply,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
    Validate,
    ValidateBinding,
)
from penstock.protocol.specs import ConstraintType, MaterializationSpec
from penstock.sdk import ApplyRequest, Binding, Documents, OpenRequest, serve
from penstock.sdk.bindings import bind
from penstock.testing.specs import bound, collection, materialization, projection

LEFT, RIGHT = WHOLE.split()
NAMES = ("staged-files", "plain-files", "push-files")

COLLECTION = collection(
    "acme/things", projection("id", "string", must=True), projection("n", "integer", "null")
)


class Task:
    """Materialization with a recovery log, on a folder that outlives its connectors."""

    def __init__(self, folder: Path, name: str, *, delta: bool = False, tables: int = 1) -> None:
        self.folder, self.name = folder, name
        self.endpoint = json.dumps({"folder": str(folder)})
        self.state = EMPTY
        self.materialization = "acme/task"
        delta_key = {"delta_updates": True} if delta and name == "staged-files" else {}
        self.spec = materialization(
            self.materialization,
            {"folder": str(folder)},
            *(
                bound(
                    COLLECTION,
                    {"name": f"t{index}", **delta_key},
                    (f"t{index}",),
                    delta=delta or name == "push-files",
                )
                for index in range(tables)
            ),
        )

    @contextmanager
    def serve(self) -> Iterator[ConnectorConnection]:
        """Yield a connection to a new connector whose only state is the folder."""
        with (
            serve(built_in(self.name), "127.0.0.1:0") as server,
            connect(server.address) as connection,
        ):
            yield connection

    def apply(self, connection: ConnectorConnection, *, dry_run: bool = False) -> str:
        return connection.apply(Apply(self.spec, "v1", dry_run)).action_description

    def open(self, connection: ConnectorConnection, key_range: KeyRange = WHOLE) -> "Shard":
        return Shard(self, connection.transactions(), key_range)

    def rows(self, table: int = 0) -> list[Any]:
        return list(print_command.documents(self.folder / f"t{table}"))


class Shard:
    """Opened and acknowledged stream of a task."""

    def __init__(self, task: Task, stream: ConnectorStream, key_range: KeyRange) -> None:
        self.task, self.stream = task, stream
        self.exchange(Open(task.spec, "v1", key_range, task.state.json or b"{}"), Opened)
        self.exchange(Acknowledge(), Acknowledged)

    def exchange(self, request: Any, response_type: type) -> Any:
        self.stream.send(request)
        response = self.stream.receive()
        assert isinstance(response, response_type)
        return response

    def load(self, *keys: str) -> list[Any]:
        if keys:
            self.stream.send(Load(0, pa.array([pack_row((key,)) for key in keys], pa.binary())))
        self.stream.send(Flush())
        documents: list[Any] = []
        while isinstance(response := self.stream.receive(), Loaded):
            documents += map(json.loads, response.docs_json.to_pylist())
        assert isinstance(response, Flushed)
        return documents

    def store(self, *docs: Mapping[str, Any], delete: bool = False, table: int = 0) -> None:
        self.stream.send(
            Store(
                table,
                pa.array([pack_row((doc["id"],)) for doc in docs], pa.binary()),
                pa.array([pack_row((doc.get("n"),)) for doc in docs], pa.binary()),
                pa.array([json.dumps(doc).encode() for doc in docs], pa.binary()),
                pa.array([False] * len(docs)),
                pa.array([delete] * len(docs)),
            )
        )

    def start_commit(self) -> StateUpdate:
        """Commit to the recovery log only, and return the previous state."""
        before = self.task.state
        response = self.exchange(StartCommit(b"checkpoint"), StartedCommit)
        if response.state is not None:
            self.task.state = combine_state(before, response.state)
        return before

    def transact(self, *docs: Mapping[str, Any], table: int = 0) -> None:
        self.load()
        if docs:
            self.store(*docs, table=table)
        self.start_commit()
        self.exchange(Acknowledge(), Acknowledged)


def doc(key: str, n: int = 0) -> dict[str, Any]:
    return {"id": key, "n": n}


# All three connectors.


@pytest.mark.parametrize("name", NAMES)
def test_dry_run_changes_nothing_and_second_apply_and_delete_are_empty(name: str, tmp_path: Path):
    task = Task(tmp_path / "deep" / "folder", name, tables=2)
    with task.serve() as connection:
        would = task.apply(connection, dry_run=True)
        assert "t0" in would
        assert "t1" in would
        assert not any(tmp_path.iterdir())
        assert task.apply(connection) == would
        assert task.apply(connection) == ""
        task.open(connection).transact(doc("a"))
        assert "t1" in connection.delete(Apply(task.spec, "v1", dry_run=True)).action_description
        assert task.rows() == [doc("a")]
        assert "t1" in connection.delete(Apply(task.spec, "v1")).action_description
        assert connection.delete(Apply(task.spec, "v1")).action_description == ""
        assert not any(task.folder.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_validate_requires_keys_and_document(name: str, tmp_path: Path):
    task = Task(tmp_path, name)
    binding = ValidateBinding('{"name": "t"}', COLLECTION)
    with task.serve() as connection:
        [validated] = connection.validate(Validate("m", task.endpoint, (binding,))).bindings
        with pytest.raises(ConnectorError, match='"t" is bound twice'):
            connection.validate(Validate("m", task.endpoint, (binding, binding)))
    assert {key: constraint.type for key, constraint in validated.constraints.items()} == {
        "flow_document": ConstraintType.LOCATION_REQUIRED,
        "id": ConstraintType.LOCATION_REQUIRED,
        "n": ConstraintType.FIELD_OPTIONAL,
    }
    assert validated.resource_path == ("t",)
    assert validated.accepts_delete
    assert validated.delta_updates is (name == "push-files")


@pytest.mark.parametrize("resource", ["", "a/b", "..", ".hidden", "a\x00", "x" * 101])
def test_resource_name_that_is_no_folder_name_is_rejected(resource: str, tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    binding = ValidateBinding(json.dumps({"name": resource}), COLLECTION)
    with task.serve() as connection, pytest.raises(ConnectorError, match="name: "):
        connection.validate(Validate("m", task.endpoint, (binding,)))


def test_resource_of_other_owner_connector_or_update_mode_is_rejected(tmp_path: Path):
    staged, plain = Task(tmp_path, "staged-files"), Task(tmp_path, "plain-files")
    delta = Task(tmp_path, "staged-files", delta=True)
    with staged.serve() as connection:
        with pytest.raises(ConnectorError, match="has not been applied"):
            staged.open(connection)
        staged.apply(connection)
        with pytest.raises(ConnectorError, match="cannot change to delta updates"):
            delta.apply(connection)
        staged.spec = MaterializationSpec("another", staged.endpoint, staged.spec.bindings)
        with pytest.raises(ConnectorError, match='belongs to materialization "acme/task"'):
            staged.apply(connection)
    with (
        plain.serve() as connection,
        pytest.raises(ConnectorError, match='belongs to connector "staged-files"'),
    ):
        plain.apply(connection)


def test_apply_of_binding_that_differs_from_validation_is_rejected(tmp_path: Path):
    task = Task(tmp_path, "plain-files", delta=True)
    with (
        task.serve() as connection,
        pytest.raises(ConnectorError, match="differs from its validation"),
    ):
        task.apply(connection)
    assert not any(tmp_path.iterdir())


def test_apply_to_foreign_folder_is_rejected_and_leaves_its_files(tmp_path: Path):
    (tmp_path / "t0").mkdir()
    (tmp_path / "t0" / "theirs").write_text("kept")
    task = Task(tmp_path, "push-files")
    with (
        task.serve() as connection,
        pytest.raises(ConnectorError, match="but no connector has created it"),
    ):
        task.apply(connection)
    assert (tmp_path / "t0" / "theirs").read_text() == "kept"


def test_apply_with_file_as_folder_is_rejected(tmp_path: Path):
    (tmp_path / "file").write_text("")
    task = Task(tmp_path / "file", "plain-files")
    with (
        task.serve() as connection,
        pytest.raises(ConnectorError, match=r"could not read folder .*: Not a dir"),
    ):
        task.apply(connection)


def test_apply_with_folder_that_cannot_be_created_is_rejected():
    task = Task(Path("/proc/folder"), "plain-files")
    with (
        task.serve() as connection,
        pytest.raises(ConnectorError, match=r"could not create folder .*: No such"),
    ):
        task.apply(connection)


# staged-files.


@pytest.mark.parametrize("delta", [False, True])
def test_committed_staged_transaction_is_applied_by_next_stream_once(delta: bool, tmp_path: Path):
    task = Task(tmp_path, "staged-files", delta=delta)
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(doc("a", 1))
        shard.load()
        shard.store(doc("a", 2), doc("b", 2))
        assert task.rows() == [doc("a", 1)]
        shard.start_commit()
        assert task.rows() == [doc("a", 1)]
    expected = [*([doc("a", 1)] if delta else []), doc("a", 2), doc("b", 2)]
    for _ in range(3):
        with task.serve() as connection:
            shard = task.open(connection)
            if not delta:
                assert shard.load("b", "c", "a") == [doc("b", 2), doc("a", 2)]
        assert task.rows() == expected


@pytest.mark.parametrize("delta", [False, True])
def test_repeated_apply_of_staged_transaction_has_no_effect(delta: bool, tmp_path: Path):
    """Simulate a crash after the table was replaced, then a much later replay."""
    task = Task(tmp_path, "staged-files", delta=delta)
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.load()
        shard.store(doc("a", 1), doc("b", 1))
        shard.start_commit()
        old = task.state
        [staged] = (tmp_path / "t0" / "staged").iterdir()
        lines = staged.read_bytes()
        shard.exchange(Acknowledge(), Acknowledged)
        assert not staged.exists()
    staged.write_bytes(lines)
    with task.serve() as connection:
        shard = task.open(connection)
        assert task.rows() == [doc("a", 1), doc("b", 1)]
        shard.transact(doc("a", 2))
        rows = task.rows()
    staged.write_bytes(lines)
    task.state = old
    with task.serve() as connection:
        task.open(connection)
    assert task.rows() == rows
    assert sorted(row["n"] for row in rows if row["id"] == "a") == ([1, 2] if delta else [2])


def test_uncommitted_staged_files_are_not_applied_and_are_removed(tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    with task.serve() as connection:
        task.apply(connection)
        for key_range in (WHOLE, LEFT):
            shard = task.open(connection, key_range)
            shard.load()
            shard.store(doc("a"))
            task.state = shard.start_commit()
            shard.stream.cancel()
    of_left, of_whole = sorted((tmp_path / "t0" / "staged").iterdir())
    assert of_whole.name.startswith(str(WHOLE))
    with task.serve() as connection:
        shard = task.open(connection)
        assert shard.load("a") == []
    assert [*(tmp_path / "t0" / "staged").iterdir()] == [of_left]
    assert task.rows() == []


def test_staged_table_is_not_applied_again_by_next_transaction(tmp_path: Path):
    """A state patch must not keep the staged names of an earlier transaction."""
    task = Task(tmp_path, "staged-files", delta=True, tables=2)
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(doc("a"), table=0)
        shard.transact(doc("b"), table=1)
        shard.transact()
    with task.serve() as connection:
        task.open(connection)
    assert (task.rows(0), task.rows(1)) == ([doc("a")], [doc("b")])


def test_split_and_joined_shards_apply_staged_work_of_their_parents(tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(doc("a", 0))
        shard.load()
        shard.store(doc("a", 1), doc("b", 1))
        shard.start_commit()
    parent = task.state
    with task.serve() as connection:
        left = task.open(connection, LEFT)
        left.transact(doc("a", 2))
        of_left, task.state = task.state, parent
        right = task.open(connection, RIGHT)
        assert right.load("a", "b") == [doc("a", 2), doc("b", 1)]
        right.store(doc("b", 2))
        right.start_commit()
        of_right = task.state
    assert [[*json.loads(state.json)] for state in (of_left, of_right)] == [
        [str(LEFT)],
        [str(RIGHT)],
    ]
    task.state = combine_state(of_left, StateUpdate(of_right.json, patch=True))
    with task.serve() as connection:
        shard = task.open(connection)
        assert shard.load("a", "b") == [doc("a", 2), doc("b", 2)]
        shard.store(doc("a", 3))
        shard.start_commit()
        shard.exchange(Acknowledge(), Acknowledged)
        assert shard.load("a", "b") == [doc("a", 3), doc("b", 2)]


def test_empty_recovery_log_after_transactions_applies_new_transaction(tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        for n in range(3):
            shard.transact(doc("a", n))
    task.state = EMPTY
    with task.serve() as connection:
        task.open(connection).transact(doc("a", 9))
    assert task.rows() == [doc("a", 9)]


def test_missing_staged_file_fails_the_stream(tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.load()
        shard.store(doc("a"))
        shard.start_commit()
        [staged] = (tmp_path / "t0" / "staged").iterdir()
        staged.unlink()
        shard.stream.send(Acknowledge())
        with pytest.raises(ConnectorError, match=r"\.jsonl.* is damaged"):
            shard.stream.receive()


changes = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 99) | st.none(), max_size=3)
"""Values that a transaction stores, by key; `None` deletes."""

steps = st.tuples(
    st.sampled_from(["acknowledged", "committed", "staged"]), st.booleans(), changes, st.booleans()
)
"""Last step before the crash, whether the transaction truncates the table first, its values,
and whether an older transactor acknowledges after it."""


@pytest.mark.parametrize("delta", [False, True])
@settings(max_examples=20)
@given(history=st.lists(steps, max_size=6))
def test_committed_staged_transactions_are_applied_once_across_crashes(
    delta: bool, history: list[tuple[str, bool, dict[str, int | None], bool]]
):
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Path(folder), "staged-files", delta=delta)
        resource = StagedResource(name="t0", delta_updates=delta)
        bindings = [bind(0, task.spec.bindings[0], resource)]
        endpoint = FilesEndpoint(folder=task.folder)
        connector = StagedFiles()
        connector.apply(ApplyRequest("acme/task", "v1", endpoint, bindings, False, task.spec))
        expected: list[dict[str, Any]] = []
        suspended = []
        for last_step, empties, stored, wakes in history:
            state = json.loads(task.state.json or b"{}")
            opening = OpenRequest("acme/task", "v1", endpoint, bindings, WHOLE, state)
            transactor = connector.open(opening)
            transactor.acknowledge()
            assert (task.rows() if delta else sorted(task.rows(), key=by_id)) == expected
            emptying = dataclasses.replace(documents(bindings[0], {}), empties=True)
            batches = [emptying] if empties else []
            batches += [documents(bindings[0], stored)] if stored else []
            transactor.store(iter(batches))
            update = transactor.start_commit(b"checkpoint")
            if last_step != "staged":
                assert update is not None
                task.state = combine_state(task.state, update)
                added = [doc(key, n) for key, n in stored.items() if n is not None]
                retained = [row for row in expected if delta or row["id"] not in stored]
                retained = [] if empties else retained
                expected = retained + added if delta else sorted(retained + added, key=by_id)
            if last_step == "acknowledged":
                transactor.acknowledge()
            elif last_step == "committed":
                suspended.append(transactor)
            if wakes and suspended:
                suspended[0].acknowledge()
        assert bool(task.state.json) is any(last_step != "staged" for last_step, *_ in history)


def by_id(row: Mapping[str, Any]) -> str:
    return str(row["id"])


def documents(binding: Binding[Any], stored: Mapping[str, int | None]) -> Documents:
    return Documents(
        binding,
        pa.array([pack_row((key,)) for key in stored], pa.binary()),
        pa.array([pack_row((n,)) for n in stored.values()], pa.binary()),
        pa.array([json.dumps(doc(key, n or 0)).encode() for key, n in stored.items()], pa.binary()),
        pa.array([False] * len(stored)),
        pa.array([n is None for n in stored.values()]),
    )


# plain-files.


def test_plain_files_late_commit_of_older_stream_is_rejected(tmp_path: Path):
    task = Task(tmp_path, "plain-files")
    with task.serve() as first, task.serve() as second:
        task.apply(first)
        older = task.open(first)
        older.transact(doc("a", 1), doc("b", 1))
        older.load()
        newer = task.open(second, RIGHT)
        newer.transact(doc("a", 2))
        older.store(doc("a", 0), doc("b", 0), doc("c", 0))
        older.stream.send(StartCommit(b"late"))
        with pytest.raises(ConnectorError, match="newer stream has taken over"):
            older.stream.receive()
        assert newer.load("a", "b", "c") == [doc("a", 2), doc("b", 1)]


def test_plain_files_streams_of_disjoint_key_ranges_both_commit(tmp_path: Path):
    task = Task(tmp_path, "plain-files")
    with task.serve() as first, task.serve() as second:
        task.apply(first)
        left, right = task.open(first, LEFT), task.open(second, RIGHT)
        left.transact(doc("a"))
        right.transact(doc("b"))
        left.transact(doc("c"))
    assert task.rows() == [doc("a"), doc("b"), doc("c")]


def test_plain_files_recreated_resource_rejects_older_stream(tmp_path: Path):
    task = Task(tmp_path, "plain-files")
    with task.serve() as first, task.serve() as second:
        task.apply(first)
        older = task.open(first)
        for _ in range(2):
            older = task.open(first)
        older.load()
        second.delete(Apply(task.spec, "v1"))
        task.apply(second)
        task.open(second)
        older.store(doc("a"))
        older.stream.send(StartCommit(b"late"))
        with pytest.raises(ConnectorError, match="newer stream has taken over"):
            older.stream.receive()
    assert task.rows() == []


def test_plain_files_stores_loads_and_deletes_keys_of_any_length(tmp_path: Path):
    task = Task(tmp_path, "plain-files")
    docs = [doc(key) for key in ("", "a", "x" * 99, "x" * 1_000, "x" * 1_001, "Ü/..\\")]
    keys = [document["id"] for document in docs]
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(*docs)
        assert shard.load(*keys, "missing") == docs
        shard.store(*docs[2:], doc("missing"), delete=True)
        shard.start_commit()
        shard.exchange(Acknowledge(), Acknowledged)
        assert shard.load(*keys) == docs[:2]


# push-files.


def test_push_files_appends_one_line_per_document(tmp_path: Path):
    task = Task(tmp_path, "push-files")
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(doc("a", 1))
        shard.load()
        shard.store(doc("a", 2))
        shard.store(doc("b"), delete=True)
        shard.start_commit()
    assert [json.loads(line) for line in lines_of(tmp_path / "t0" / "pushed.jsonl")] == [
        {"binding": "t0", "key": ["a"], "deleted": False, "document": doc("a", 1)},
        {"binding": "t0", "key": ["a"], "deleted": False, "document": doc("a", 2)},
        {"binding": "t0", "key": ["b"], "deleted": True, "document": doc("b")},
    ]
    assert task.rows() == [doc("a", 1), doc("a", 2)]


def test_push_files_removes_partial_line_of_killed_writer(tmp_path: Path):
    task = Task(tmp_path, "push-files")
    with task.serve() as connection:
        task.apply(connection)
        shard = task.open(connection)
        shard.transact(doc("a"))
        with (tmp_path / "t0" / "pushed.jsonl").open("ab") as file:
            file.write(b'{"binding":"t0","key":["b"')
        shard.transact(doc("b"))
    assert task.rows() == [doc("a"), doc("b")]


# Shared file functions.

texts = st.text() | st.sampled_from([',"document":', '"', "\\", "\n", "\u2028"])


@given(st.dictionaries(texts, texts | st.integers() | st.lists(texts), min_size=1), st.lists(texts))
def test_parts_of_line_round_trip(about: dict[str, Any], document: Sequence[str]):
    about = {f"about {key}": value for key, value in about.items()}
    text = json.dumps(document, ensure_ascii=False).encode()
    line = line_of(about, text)
    assert line.count(b"\n") == 1
    assert parts_of(line) == (about, text)
    assert json.loads(line) == {**about, "document": document}
    assert json.loads(parts_of(line_of(about, text.replace(b", ", b",\n\r\n ")))[1]) == document


def test_replace_file_leaves_only_the_new_contents(tmp_path: Path):
    for data in (b"older", b"", b"newer"):
        replace(tmp_path / "file", data)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", data)]


def test_cancelled_wait_for_file_lock_raises(tmp_path: Path):
    cancelled = threading.Event()
    cancelled.set()
    with (
        locked(tmp_path, threading.Event()),
        pytest.raises(PenstockError, match="was cancelled"),
        locked(tmp_path, cancelled),
    ):
        pass
    with locked(tmp_path, cancelled):
        pass


def test_isolated_script_prints_resource_or_reports_missing_resource(tmp_path: Path):
    task = Task(tmp_path, "staged-files")
    with task.serve() as connection:
        task.apply(connection)
        task.open(connection).transact(doc("ü"), doc("b"))
    script = [sys.executable, "-I", str(print_command.__file__)]
    ran = subprocess.run([*script, str(tmp_path), "t0"], capture_output=True, check=True)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [doc("ü"), doc("b")]
    ran = subprocess.run([*script, str(tmp_path), "t9"], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (
        1,
        f'error: resource "t9" does not exist in folder "{tmp_path}"\n'.encode(),
    )
