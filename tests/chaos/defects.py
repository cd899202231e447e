"""Planted bugs by name: plausible mistakes that the checks must detect.

    with planted("unplanned"): …

Bugs of the runtime take effect in the runtime's process, bugs of connectors in theirs. Rows
and hazards refer to docs/explanation/hazards.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from msgspec.structs import replace as replaced

from penstock.connectors.files import plain_files
from penstock.connectors.files import staged_files as staged_module
from penstock.connectors.files import table as table_module
from penstock.connectors.files.atomic_files import lines_of, locked, replace
from penstock.connectors.files.folder import last_applied
from penstock.connectors.files.plain_files import PlainTransactor
from penstock.connectors.files.table import Table
from penstock.connectors.postgres import transactor as postgres_transactor
from penstock.connectors.sqlite import transactor as sqlite_transactor
from penstock.connectors.sqlite.connector import SqliteConnector
from penstock.materialize import loop, shard, shard_transaction
from penstock.materialize.connector_session import ConnectorSession
from penstock.materialize.intervals import BoundResource, missing_interval
from penstock.materialize.recovery_log import RecoveryLog
from penstock.sdk import stream as sdk_stream
from penstock.sdk.sql import fence as fence_module
from penstock.sdk.sql import table_changes

DEFECTS: dict[str, Callable[[], Any]] = {}


def _defect(plant: Callable[[], Any]) -> Callable[[], Any]:
    DEFECTS[plant.__name__] = plant
    return plant


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the bug of that name, or none."""
    if name is None:
        yield
    else:
        with DEFECTS[name]():
            yield


# Runtime.


@_defect
def unplanned() -> Any:
    """Row 20: the upper is not recorded before Store."""
    commit = RecoveryLog.commit
    return _all(
        mock.patch.object(RecoveryLog, "plan", lambda self, _upper, _frozen=(): self),
        mock.patch.object(RecoveryLog, "commit", lambda self, shards, **_: commit(self, shards)),
    )


@_defect
def equality_only() -> Any:
    """Row 19: the lower of a shard is the recovery log's, unless its upper is equal."""
    opened = ConnectorSession.open.__func__  # type: ignore[attr-defined]

    def open(cls: Any, connection: Any, request: Any, *, id: str, logged: Any) -> ConnectorSession:
        session: ConnectorSession = opened(cls, connection, request, id=id, logged=logged)
        if logged is not None:
            session.checkpoint = logged
        return session

    return _all(mock.patch.object(ConnectorSession, "open", classmethod(open)), unplanned())


@_defect
def acknowledge_late() -> Any:
    """Row 26: Acknowledge is sent with the next data."""
    acknowledge, settle, begin = (
        ConnectorSession.acknowledge,
        ConnectorSession.settle,
        ConnectorSession.begin,
    )
    late: set[int] = set()

    def postpone(self: ConnectorSession) -> None:
        late.add(id(self))

    def settle_unless_postponed(self: ConnectorSession) -> None:
        if id(self) not in late:
            settle(self)

    def before(self: ConnectorSession, *given: Any) -> None:
        if id(self) in late:
            late.discard(id(self))
            acknowledge(self)
        begin(self, *given)

    return _all(
        mock.patch.object(ConnectorSession, "acknowledge", postpone),
        mock.patch.object(ConnectorSession, "settle", settle_unless_postponed),
        mock.patch.object(ConnectorSession, "begin", before),
        mock.patch.object(ConnectorSession, "idle", True),
    )


@_defect
def forget_state() -> Any:
    """Connector state of StartedCommit is not in the recovery log."""
    return mock.patch.object(shard, "_merge_state", lambda state_json, _update: state_json)


@_defect
def ignore_key_range() -> Any:
    """Every shard stores every document."""
    return mock.patch.object(
        shard_transaction, "_within", lambda keys, _range: pa.array(np.ones(len(keys), np.bool_))
    )


@_defect
def no_bindings() -> Any:
    """Row 23: the checkpoint has a frontier, but no bindings."""

    def interval_without_bindings(bound: Any, opened: Any, upper: int) -> Any:
        if opened.bindings and bound.path not in opened.bindings:
            frontier = max(each.frontier for each in opened.bindings.values())
            any_of = next(iter(opened.bindings.values()))
            held = replaced(any_of, collection=bound.collection, frontier=frontier)
            opened = replaced(opened, bindings={**opened.bindings, bound.path: held})
        return missing_interval(bound, opened, upper)

    return mock.patch.object(shard, "missing_interval", interval_without_bindings)


@_defect
def any_session() -> Any:
    """Row 21: any open stream continues."""
    return mock.patch.object(shard, "_continues", return_value=True)


@_defect
def hold_at_upper() -> Any:
    """C7: the hold advances before the planned interval is acknowledged."""
    transact = loop.MaterializationLoop._transact

    def release_early(self: loop.MaterializationLoop, upper: int, **more: Any) -> None:
        names = [each.collection for each in self._section.bindings]
        self._inputs.hold(dict.fromkeys(names, upper - 1))
        transact(self, upper, **more)

    return mock.patch.object(loop.MaterializationLoop, "_transact", release_early)


@_defect
def any_layout() -> Any:
    """C14: rows of another layout are never stored again."""
    return mock.patch.object(BoundResource, "holds_layout", return_value=True)


@_defect
def lost_resource_created_again() -> Any:
    """C15: Apply creates a resource that was dropped, and the checkpoint still counts."""
    return mock.patch.object(loop, "lost_resources", return_value=())


# Connectors.


@_defect
def drop_documents() -> Any:
    """One of three batches is not stored."""
    batches = sdk_stream._Stores.__iter__
    count = iter(range(10**9))

    def batches_to_keep(self: Any) -> Iterator[Any]:
        for batch in batches(self):
            if next(count) % 3 != 2:
                yield batch

    return mock.patch.object(sdk_stream._Stores, "__iter__", batches_to_keep)


@_defect
def apply_twice() -> Any:
    """Staged files are not deleted, and a second Acknowledge applies them again."""

    def apply(self: Table, staged: Any, key_range: str, number: int, cancelled: Any) -> None:
        resource = last_applied(self.folder)
        assert resource is not None
        with locked(self.folder, cancelled):
            lines = [*self.lines(), *lines_of(staged)]
            if not resource.delta_updates:
                lines = [*table_module._last_by_key(lines).values()]
            head = b'{"applied": {"%s": %d}}\n' % (key_range.encode(), number)
            replace(self._file, head + b"".join(lines))

    return _all(
        mock.patch.object(Table, "apply", apply),
        mock.patch.object(staged_module.StagedTransactor, "_clean", return_value=None),
    )


@_defect
def unconditional_write() -> Any:
    """Row 22: a store without transactions accepts every write of any owner."""

    store = PlainTransactor.store

    def store_unchecked(self: PlainTransactor, documents: Iterator[Any]) -> None:
        ours = {str(self._key_range): self._own}
        with mock.patch.object(plain_files, "_writers", return_value=ours):
            store(self, documents)

    return mock.patch.object(PlainTransactor, "store", store_unchecked)


@_defect
def unfenced_commit() -> Any:
    """A commit succeeds although its fence is outdated."""

    def commit(
        session: Any,
        dialect: Any,
        fence: Any,
        checkpoint: bytes,
        path: Sequence[str] = (),
        **_: Any,
    ) -> None:
        table = dialect.quoted_path(path or (fence_module.TABLE,))
        session.run(
            f"UPDATE {table} SET checkpoint = ? WHERE materialization = ? AND key_begin = ?",
            [fence_module._text(checkpoint), fence.materialization, fence.key_range.begin],
        )

    return _all(
        mock.patch.object(sqlite_transactor, "commit_fence", commit),
        mock.patch.object(postgres_transactor, "commit_fence", commit, create=True),
    )


@_defect
def truncate_in_apply() -> Any:
    """Row 18: Apply truncates the resources instead of the first transaction."""
    apply = SqliteConnector.apply

    def apply_and_truncate(self: SqliteConnector, applying: Any) -> str:
        done = apply(self, applying)
        with self.session(applying.endpoint, touch=True) as session:
            for each in applying.bindings:
                session.run(f"DELETE FROM {self.dialect.quoted_path(each.path)}")
        return done

    return mock.patch.object(SqliteConnector, "apply", apply_and_truncate)


@_defect
def add_column_without_fill() -> Any:
    """C14: ADD COLUMN lacks the default that the connector has announced to fill in."""
    return mock.patch.object(table_changes, "fillable", return_value={})


@contextmanager
def _all(*bugs: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug)
        yield
