"""History of a test: operations and observations of all processes.

Each process appends events to its own file, one JSON object per line, before
and after each operation. A line is one `write` with O_APPEND: a `kill -9`
loses only events that had not happened yet. The boot clock of the machine
orders the lines of all processes.

An *operation* has an intent with unique updates, and at most one outcome.
Each share of an operation in a collection contains one update whose datum is
the name of the operation and which is never retracted: its *marker*.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from penstock.durable import Blob
from penstock.errors import (
    Corruption,
    DeterminateError,
    Fenced,
    IndeterminateError,
    InternalError,
    PenstockError,
    UsageError,
)
from penstock.persist import (
    AlreadyFailed,
    Appended,
    AppendTo,
    Client,
    Collection,
    HoldLost,
    Listener,
    NotYetComplete,
    SinceError,
    Snapshot,
    UpperMismatch,
)
from penstock.persist.checksum_walk import verify

Event: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, int, int]
"""Datum, time, diff."""


class Recorder:
    """Event writer of one process."""

    def __init__(self, who: str, path: Path | None = None) -> None:
        self.who = who
        self.events: list[Event] = []
        self._file = None
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, **facts: Any) -> None:
        """Record one event."""
        line = {"at": boot_ns(), "who": self.who, "event": event, **facts}
        if self._file is None:
            self.events.append(line)
        else:
            os.write(self._file, json.dumps(line).encode() + b"\n")


def boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def read_history(folder: Path) -> list[Event]:
    """Return the events in all files of `folder`, in order."""
    events: list[Event] = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_bytes().split(b"\n")
        if line.endswith(b"}")  # A killed process may leave half a line.
    ]
    return sorted(events, key=lambda event: event["at"])


def merged(recorders: Iterable[Recorder]) -> list[Event]:
    """Return the events of several recorders of one process, in order."""
    events = [event for recorder in recorders for event in recorder.events]
    return sorted(events, key=lambda event: event["at"])


class Scribe:
    """Client of a location that records the intent and outcome of each operation."""

    def __init__(self, recorder: Recorder, client: Client) -> None:
        self.recorder = recorder
        self.client = client
        self._number = 0
        self.last = ""
        """Name of the last operation."""
        self.fenced = False
        self.listeners: list[Listener] = []
        recorder.note("opened", epoch=client.epoch, url=client.url)

    def append(
        self, collection: Collection, times: Sequence[int], expected: int, upper: int, **more: Any
    ) -> str:
        """Call `compare_and_append` with new rows, and return the name of the outcome."""
        op, rows = self._intend("append", {collection: times}, {collection: upper}, **more)
        return self.outcome(
            op,
            lambda: collection.compare_and_append(
                shaped(collection, rows[collection]), expected, upper
            ),
        )

    def write(self, collection: Collection, times: Sequence[int], **more: Any) -> str:
        """Call `write` and wait for the outcome."""
        op, rows = self._intend("write", {collection: times}, {}, **more)
        return self.outcome(
            op, lambda: collection.write(shaped(collection, rows[collection])).result()
        )

    def burst(
        self, collection: Collection, times: Sequence[Sequence[int]], upper: int
    ) -> list[str]:
        """Call several writes and a seal before the first is answered; return the outcomes."""
        called: list[tuple[str, Future[Appended]]] = []
        for at in times:
            op, rows = self._intend("write", {collection: at}, {})
            updates = shaped(collection, rows[collection])
            called.append((op, self._called(partial(collection.write, updates))))
        op, _ = self._intend("seal", {}, {collection: upper})
        called.append((op, self._called(lambda: collection.seal(upper))))
        return [self.outcome(op, future.result) for op, future in called]

    def _called(self, call: "Callable[[], Future[Appended]]") -> "Future[Appended]":
        try:
            return call()
        except PenstockError as error:
            future: Future[Appended] = Future()
            future.set_exception(error)
            return future

    def seal(self, collection: Collection, upper: int) -> str:
        """Call `seal` and wait for the outcome."""
        op, _ = self._intend("seal", {}, {collection: upper})
        return self.outcome(op, lambda: collection.seal(upper).result())

    def append_all(self, shares: Sequence[tuple[Collection, Sequence[int], int, int]]) -> str:
        """Append atomically. A share has a collection, times, expected upper and new upper."""
        op, rows = self._intend(
            "append_all", {s[0]: s[1] for s in shares}, {s[0]: s[3] for s in shares}
        )
        return self.outcome(
            op,
            lambda: self.client.append_all(
                [
                    AppendTo(each, shaped(each, rows[each]), expected, upper)
                    for each, _, expected, upper in shares
                ]
            ),
        )

    def destroy(self, collection: Collection) -> str:
        """Destroy the collection, recorded by its id."""
        op = self._name()
        self.recorder.note("intent", op=op, kind="destroy", destroys=collection.id)

        def done() -> Appended:
            collection.destroy()
            return Appended(0)

        return self.outcome(op, done)

    def control(self, kind: str, act: Callable[[], object]) -> str:
        """Execute another operation that has no rows."""
        op = self._name()
        self.recorder.note("intent", op=op, kind=kind)

        def done() -> Appended:
            act()
            return Appended(0)

        return self.outcome(op, done)

    def outcome(self, op: str, act: Callable[[], Appended | UpperMismatch]) -> str:
        """Execute the operation, and record its outcome."""
        try:
            answer = act()
        except Fenced as error:
            self.fenced = True
            self.recorder.note("fenced", op=op, error=str(error))
            return self._note(op, "fenced", error)
        except (UsageError, AlreadyFailed, DeterminateError) as error:
            return self._note(op, "refused", error)
        except IndeterminateError as error:
            return self._note(op, "doubt", error)
        except (Corruption, InternalError) as error:
            self.recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
            return self._note(op, "doubt", error)
        if isinstance(answer, UpperMismatch):
            return self._note(op, "refused", answer)
        return self._note(op, "acknowledged", answer)

    def inspect(self, collection: Collection) -> tuple[int, int]:
        """Record and return since and upper as this process sees them."""
        state = collection.state
        self.recorder.note("seen", id=state.id, since=state.since, upper=state.upper)
        return state.since, state.upper

    def snapshot(
        self, collection: Collection, as_of: int, *, held: bool = False
    ) -> Snapshot | None:
        """Read as of a time, and record the contents or the error."""
        try:
            found = collection.snapshot(as_of)
        except (SinceError, NotYetComplete, HoldLost, UsageError) as error:
            self.recorder.note(
                "denied",
                id=collection.id,
                as_of=as_of,
                error=f"{type(error).__name__}: {error}",
                held=held and not isinstance(error, HoldLost),
            )
            if isinstance(error, HoldLost):
                raise
            return None
        except (Corruption, InternalError) as error:
            self.recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
            return None
        self.recorder.note("snapshot", id=collection.id, as_of=as_of, contents=contents_of(found))
        return found

    def listen(self, collection: Collection, as_of: int, name: str) -> "Listening":
        """Start a listener that records all received changes."""
        listener = collection.listen(as_of)
        self.listeners.append(listener)
        self.recorder.note("listen", listener=name, id=collection.id, as_of=as_of)
        return Listening(self.recorder, listener, name, collection.id)

    def _intend(
        self,
        kind: str,
        times: dict[Collection, Sequence[int]],
        uppers: dict[Collection, int],
        *,
        retract: Sequence[str] = (),
        wide: int = 0,
    ) -> tuple[str, dict[Collection, list[Row]]]:
        """Name the operation and build its rows: the marker, then a row for each time."""
        op = self._name()
        rows: dict[Collection, list[Row]] = {}
        for collection, at in times.items():
            first = min(at)
            rows[collection] = [(op, first, 1)]
            rows[collection] += [(f"{op}.{i}", when, 1) for i, when in enumerate(at)]
            rows[collection] += [(f"{op}.wide.{i}", first, 1) for i in range(wide)]
            rows[collection] += [(datum, first, -1) for datum in retract]
        self.recorder.note(
            "intent",
            op=op,
            kind=kind,
            rows={each.id: each_rows for each, each_rows in rows.items()},
            uppers={each.id: upper for each, upper in uppers.items()},
        )
        return op, rows

    def _name(self) -> str:
        epoch = self.client.epoch or 0
        self._number += 1
        self.last = f"{self.recorder.who}:{epoch}:{self._number}"
        return self.last

    def _note(self, op: str, outcome: str, detail: object) -> str:
        self.recorder.note("outcome", op=op, outcome=outcome, detail=str(detail))
        return outcome


class Listening:
    """Listener that records received changes."""

    def __init__(self, recorder: Recorder, listener: Listener, name: str, id: int) -> None:
        self._recorder = recorder
        self._name = name
        self._id = id
        self.listener = listener

    def step(self, *, timeout_ms: int = 0) -> bool:
        """Receive the changes that are complete, and return whether there were any."""
        changes = self.listener.next_changes(timeout_ms=timeout_ms)
        if changes is None:
            return False
        assert not isinstance(changes, Snapshot)
        self._recorder.note(
            "changes",
            listener=self._name,
            id=self._id,
            lower=changes.lower,
            upper=changes.upper,
            rows=[(datum_of(each.data), each.time, each.diff) for each in changes],
        )
        return True

    def ended(self, *, expected: int) -> None:
        """Record the frontier of the listener and the expected one."""
        self._recorder.note(
            "ended",
            listener=self._name,
            id=self._id,
            frontier=self.listener.frontier,
            expected=expected,
        )


def note_final(recorder: Recorder, client: Client, blob: Blob) -> None:
    """Record the state that a new process finds: contents, unsealed rows, damage."""
    found = []
    try:
        for name in client.collections():
            collection = client.collection(name)
            state = collection.state
            as_of = state.upper - 1
            contents: dict[str, int] = {}
            if as_of >= state.since:
                contents = contents_of(collection.snapshot(as_of))
            found.append(
                {
                    "id": state.id,
                    "name": name,
                    "since": state.since,
                    "upper": state.upper,
                    "contents": contents,
                    "unsealed": unsealed_of(client, collection),
                }
            )
        report = verify(blob)
        damage = [[each.key, each.reason] for each in report.damage]
    except PenstockError as error:
        recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
        return
    recorder.note("final", collections=found, damage=damage)


def unsealed_of(client: Client, collection: Collection) -> list[Row]:
    """Return the rows at or beyond upper, which no snapshot contains."""
    reader, state = client.reader, collection.state
    schema = state.schemas[-1]
    table = reader.rows(state, schema, lower=state.upper, upper=2**63 - 1)
    data = reader.decoder(state, schema)(table)
    times, diffs = table.column("mz_timestamp").to_pylist(), table.column("mz_diff").to_pylist()
    return [(datum_of(each), t, d) for each, t, d in zip(data, times, diffs, strict=True)]


def contents_of(snapshot: Snapshot) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in snapshot:
        datum = datum_of(each.data)
        found[datum] = found.get(datum, 0) + each.diff
    return {datum: count for datum, count in sorted(found.items()) if count}


def datum_of(data: Any) -> str:
    """Return the identity of a row: the key of a pair, the column `k` of a row."""
    if isinstance(data, dict):
        return str(data["k"])
    return str(data[0])


def shaped(collection: Collection, rows: Sequence[Row]) -> Any:
    """Return the rows in the form that the collection accepts."""
    if collection.state.schemas[-1].codecs:
        return [((datum, None), when, diff) for datum, when, diff in rows]
    return [({"k": datum}, when, diff) for datum, when, diff in rows]
