"""Stream of a task: loads, stores and commits, and checks of their result."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.materialize.connector_client import ConnectorConnection
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import (
    START_FROM_ZERO,
    Acknowledge,
    Acknowledged,
    Flush,
    Flushed,
    Load,
    Loaded,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    Store,
)
from penstock.protocol.specs import DOCUMENT
from penstock.testing.conformance.check import Failed, Skipped
from penstock.testing.conformance.documents import Document, encoded, same_json

if TYPE_CHECKING:
    from penstock.testing.conformance.task import Task

__all__ = ["Shard", "Stored"]


@dataclass(frozen=True)
class Stored:
    """Documents that were stored, and may be committed."""

    binding: int
    docs: Sequence[Document]
    delete: bool = False
    empties: bool = False
    """Truncation instead of documents: all earlier documents are removed."""


class Shard:
    """Stream of a task for a key range."""

    def __init__(
        self, task: "Task", key_range: KeyRange, connection: ConnectorConnection | None
    ) -> None:
        self.task = task
        self.peer = task.peer
        self.key_range = key_range
        self.log = task.log(key_range)
        self.exchange = self.peer.exchange(connection=connection)
        self._requested: dict[int, set[str]] = {}
        self._pending: list[Stored] = []
        self._checkpoint = b""

    def open(self) -> Opened:
        """Open the stream and learn the checkpoint of the task."""
        state = self.log.state.json or b"{}"
        self.exchange.send(Open(self.task.spec, self.task.version, self.key_range, state))
        opened = self.exchange.expect(Opened)
        self._resolve_indeterminate(opened.checkpoint)
        return opened

    def acknowledge(self) -> None:
        """Complete the last transaction on both sides."""
        self.exchange.send(Acknowledge())
        self.acknowledged()

    def acknowledged(self) -> None:
        """Wait until the endpoint has committed too."""
        self.exchange.expect(Acknowledged)
        self._record_commit()

    def load(self, binding: int, docs: Iterable[Document]) -> None:
        """Request the documents with the keys of these."""
        requested = list(docs)
        layout = self.task.layout(binding)
        self._requested.setdefault(binding, set()).update(layout.key(doc) for doc in requested)
        self.exchange.send(Load(binding, layout.packed_keys(requested)))

    def record_load(self, binding: int, docs: Iterable[Document]) -> None:
        """Record that a Load of these was sent as raw bytes."""
        layout = self.task.layout(binding)
        self._requested.setdefault(binding, set()).update(layout.key(doc) for doc in docs)

    def flush(self) -> dict[int, dict[str, Document]]:
        """Send Flush, and return all loaded documents, by binding and key."""
        self.exchange.send(Flush())
        return self.flushed()

    def flushed(self) -> dict[int, dict[str, Document]]:
        """Return the documents that arrive before Flushed."""
        loaded: dict[int, dict[str, Document]] = {}
        while True:
            response = self.exchange.next("Flushed")
            match response:
                case Loaded(binding, docs):
                    self._add_loaded(loaded, binding, docs)
                case Flushed():
                    self._requested.clear()
                    return loaded
                case _:
                    raise Failed(f"received {response.kind} instead of Loaded or Flushed")

    def store(
        self,
        binding: int,
        docs: Sequence[Document],
        *,
        delete: bool = False,
        exists: bool | None = None,
    ) -> None:
        """Store documents; `exists` defaults to the correct value."""
        held = self.task.held(binding)
        layout = self.task.layout(binding)
        selected = self.task.spec.bindings[binding].field_selection
        known = [
            exists
            if exists is not None
            else not self.task.delta(binding) and held.get(layout.key(doc)) is not None
            for doc in docs
        ]
        self.exchange.send(
            Store(
                binding,
                layout.packed_keys(docs),
                layout.packed_values(docs, selected.values),
                encoded(docs),
                pa.array(known, pa.bool_()),
                pa.array([True] * len(docs), pa.bool_()) if delete else None,
            )
        )
        self.pending(binding, docs, delete=delete)

    def pending(self, binding: int, docs: Sequence[Document], *, delete: bool = False) -> None:
        """Record that these were stored and are to be committed."""
        self._pending.append(Stored(binding, list(docs), delete))

    def empty(self, binding: int) -> None:
        """Truncate the resource of a binding."""
        self.exchange.send(Store.truncate(binding))
        self._pending.append(Stored(binding, (), empties=True))

    def begin_commit(self, checkpoint: bytes = b"") -> None:
        """Send StartCommit without waiting for a response."""
        self._checkpoint = checkpoint or self.task.next_checkpoint()
        if self.peer.remote:
            self.log.indeterminate = (self._checkpoint, tuple(self._pending))
        self.exchange.send(StartCommit(self._checkpoint))

    def started_commit(self, *, logged: bool = True) -> None:
        """Wait for StartedCommit, then commit to the recovery log, unless `logged` is false."""
        started = self.exchange.expect(StartedCommit)
        if not logged:
            return
        self.log.checkpoint = self._checkpoint
        if started.state is not None:
            self.log.state = combine_state(self.log.state, started.state)
        if not self.peer.remote:
            self.task.commit(self._pending)
        self._pending = []

    def start_commit(self) -> None:
        """Commit up to and including the recovery log."""
        self.begin_commit()
        self.started_commit()

    def commit(self) -> None:
        """Commit, and prepare for the next transaction."""
        self.start_commit()
        self.acknowledge()

    def transact(self, *docs: Document, binding: int = 0, delete: bool = False) -> None:
        """Run a complete transaction that stores these."""
        self.flush()
        if docs:
            self.store(binding, docs, delete=delete)
        self.commit()

    def cancel(self) -> None:
        """Cancel the stream."""
        self.exchange.cancel()

    def absent(self, binding: int, doc: Document) -> None:
        """Check that the key of this document does not exist.

        Raises:
            Failed: the key exists.
        """
        if self.task.delta(binding):
            rows = self.peer.connectors.rows(self.task.resources[binding].name)
            if doc["id"] in {self._comparable(row)[0] for row in rows}:
                raise Failed(f"key {doc['id']} exists, and must not")
            return
        self.load(binding, [doc])
        if loaded := self.flush():
            raise Failed(f"{self.peer.render(loaded[binding])} exists, and must not")
        self.commit()

    def verify(self, *, rows: bool = False) -> None:
        """Compare the endpoint with the committed documents, in a separate transaction.

        Standard bindings are compared by Load. Delta bindings are compared by `read`. With `rows`,
        the standard bindings are also compared by `read`, if it is configured.

        Raises:
            Failed: they differ.
            Skipped: there is no way to inspect the endpoint.
        """
        bindings = range(len(self.task.resources))
        standard = [binding for binding in bindings if not self.task.delta(binding)]
        for binding in standard:
            if held := self.task.held(binding):
                names = self.task.layout(binding).keys
                keys = [dict(zip(names, json.loads(key), strict=True)) for key in held]
                self.load(binding, keys)
        loaded = self.flush()
        for binding in standard:
            self.compare(binding, loaded.get(binding, {}))
        self.commit()
        for binding in bindings:
            if self.task.delta(binding):
                self._compare_pushed(binding)
            elif rows and self.peer.config.read:
                self._compare_rows(binding)

    def compare(self, binding: int, loaded: Mapping[str, Document]) -> None:
        """Compare the loaded documents of a binding with the expected ones."""
        for key, expected in self.task.held(binding).items():
            actual = loaded.get(key)
            if expected is None and actual is not None:
                raise Failed(f"key {key} was removed, but exists: {self.peer.render(actual)}")
            if expected is not None and actual is None:
                raise Failed(f"key {key} is missing; it must be {self.peer.render(expected)}")
            if expected is not None and not same_json(expected, actual):
                raise Failed(
                    f"key {key} is {self.peer.render(actual)}, "
                    f"and must be {self.peer.render(expected)}"
                )

    def _compare_rows(self, binding: int) -> None:
        """Check that each key is in one row, and that there is no other key."""
        expected = Counter(self._comparable(doc) for doc in self.task.held(binding).values() if doc)
        self._same_rows(binding, expected, exact=True)

    def _compare_pushed(self, binding: int) -> None:
        expected = Counter(
            self._comparable(doc)
            for stored in self.task.committed
            if stored.binding == binding
            for doc in stored.docs
        )
        self._same_rows(binding, expected, exact=self.peer.exact)

    def _same_rows(self, binding: int, expected: Counter[Any], *, exact: bool) -> None:
        name = self.task.resources[binding].name
        actual = Counter(self._comparable(row) for row in self.peer.connectors.rows(name))
        if missing := expected - actual:
            raise Failed(f"`read` of {name} does not print {self.peer.render(next(iter(missing)))}")
        if exact and (unexpected := actual - expected):
            row = next(iter(unexpected))
            raise Failed(
                f"`read` of {name} prints {self.peer.render(row)} {actual[row]} times, "
                f"and must print it {expected[row]} times"
            )

    def _add_loaded(
        self, loaded: dict[int, dict[str, Document]], binding: int, docs: pa.BinaryArray
    ) -> None:
        if binding >= len(self.task.resources):
            raise Failed(f"Loaded refers to binding {binding}, which does not exist")
        layout = self.task.layout(binding)
        for text in docs.to_pylist():
            try:
                doc = json.loads(text)
            except ValueError:
                doc = None
            if not isinstance(doc, dict):
                rendered = self.peer.render(text.decode(errors="replace"))
                raise Failed(f"Loaded has a document that is no JSON object: {rendered}")
            key = layout.key(doc)
            if key not in self._requested.get(binding, ()):
                raise Failed(f"Loaded has key {key} of binding {binding}, which no Load requested")
            if key in loaded.setdefault(binding, {}):
                raise Failed(f"Loaded has key {key} of binding {binding} twice")
            loaded[binding][key] = doc

    def _resolve_indeterminate(self, opened: bytes) -> None:
        """Derive from Opened whether the indeterminate transaction was committed."""
        if not self.peer.remote:
            if opened not in (b"", START_FROM_ZERO, self.log.checkpoint):
                raise Skipped("the connector resumes from its own checkpoint")
            return
        resumed = b"" if opened == START_FROM_ZERO else opened or self.log.checkpoint
        if not opened and self.log.stored:
            raise Failed(
                "Opened has no checkpoint, but a checkpoint was committed",
                hint="An authoritative endpoint stores the checkpoint with its data.",
            )
        if self.log.indeterminate is not None and resumed == self.log.indeterminate[0]:
            self._record_commit()
        elif resumed == self.log.stored:
            self.log.indeterminate = None
        else:
            raise Failed(
                f"Opened has checkpoint {resumed.hex()}, and must have {self.log.stored.hex()}"
            )
        self.log.checkpoint = resumed

    def _record_commit(self) -> None:
        if self.log.indeterminate is not None:
            self.log.stored, stored = self.log.indeterminate
            self.log.indeterminate = None
            self.task.commit(stored)

    def _comparable(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the compared fields of a row or of a document."""
        if "id" in row:
            return row["id"], row.get("word")
        doc = row.get(DOCUMENT)
        if isinstance(doc, str):
            doc = json.loads(doc)
        if not isinstance(doc, dict) or "id" not in doc:
            raise Failed(
                f"`read` printed neither a column id nor {DOCUMENT}: {self.peer.render(dict(row))}",
                hint="Print columns with the names of the fields, or documents.",
            )
        return doc["id"], doc.get("word")
