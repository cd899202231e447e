"""One Transactions stream: the only concurrency in the wing.

    gRPC ─ bytes ─► reader thread ─ requests, in order ─► driver thread ─► transactor
         ◄─ bytes ─ responses that wait ◄───────────────────────┘

The reader decodes, holds the runtime to the table of messages, and stops reading
when much is waiting, so that Loads can come while a commit is under way and memory
stays bounded. The driver calls the transactor, one method after the other. When
the stream is broken off, by the runtime, the line or a newer stream, the transactor
is told at once (`cancel`; while it is being opened, by the event `broken_off`), and closed
by the driver, which rolls back.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Fenced
from penstock.protocol.errors import ProtocolError, RemoteProtocolError
from penstock.protocol.key_range import WHOLE, KeyRange
from penstock.protocol.message_rules import is_json_object
from penstock.protocol.messages import (
    Acknowledged,
    Flush,
    Flushed,
    Kind,
    Load,
    Loaded,
    Open,
    Opened,
    Request,
    Response,
    StartCommit,
    StartedCommit,
    StateUpdate,
    Store,
)
from penstock.protocol.transaction import Role, Transaction
from penstock.protocol.wire import decode_request, encode_response
from penstock.sdk.batches import Documents, Found, Keys
from penstock.sdk.bindings import Binding
from penstock.sdk.duplicate_keys import EachOnce
from penstock.sdk.errors import BrokenOff, ContractBroken, Overdue
from penstock.sdk.transactor import Transactor
from penstock.telemetry import fields, logger

__all__ = ["Opener", "Stream"]

log = logger("sdk")

WAITING_BYTES: Final = 32 << 20
"""So much may wait in each direction, before who sends it has to wait."""

MESSAGE_BYTES: Final = 1 << 20
"""Loaded documents are sent in messages of about this size."""

OPEN_S: Final = 60.0
"""So long a runtime may take to say Open; a stream that does not costs a thread."""

Opener = Callable[[Open, "Stream"], tuple[Transactor, list[Binding[Any]]]]
"""Opens the transactor that a stream asks for, with its bindings."""


class Stream:
    """One stream, from its first request to its end."""

    def __init__(self, name: str, opener: Opener, ended: Callable[["Stream"], None]) -> None:
        """`ended` is told once the transactor is closed, however that came."""
        self._name = name
        self._open = opener
        self._ended = ended
        self._where = Transaction(Role.CONNECTOR)
        self._changed = threading.Condition()
        self._requests: deque[tuple[Request, int]] = deque()
        self._responses: deque[bytes] = deque()
        self._waiting = {"in": 0, "out": 0}
        self._said_all = False
        """The runtime says no more."""

        self._over = False
        """The driver has ended; `error` is why, if it is not well."""

        self._broken: Exception | None = None
        self.broken_off = threading.Event()
        self._transactor: Transactor | None = None
        self.error: BaseException | None = None
        self.key_range: KeyRange | None = None
        self.finished = threading.Event()
        """Set once the transactor is closed."""

    # What gRPC calls.

    def run(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """The responses to `requests`; ends when the stream does, or when nobody listens."""
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        threading.Thread(target=self._drive, daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._responses or self._over or isinstance(self._broken, BrokenOff)
                )
                if not self._responses:
                    self.error = self.error or self._broken
                    return
                data = self._responses.popleft()
                self._waiting["out"] -= len(data)
                self._changed.notify_all()
            yield data

    def break_off(self, why: Exception) -> None:
        """End at once; what is not committed is rolled back."""
        with self._changed:
            if self._broken is None:
                self._broken = why
            self._changed.notify_all()
        self.broken_off.set()
        # In a thread of its own: who breaks us off may be the one thread that serves everybody.
        if self._transactor is not None:
            threading.Thread(target=self._cancel, args=(self._transactor,), daemon=True).start()

    def _cancel(self, transactor: Transactor) -> None:
        if self.finished.is_set():
            return
        try:
            transactor.cancel()
        except Exception as error:  # noqa: BLE001 - it is over either way
            self._failed("cancel", error)

    def _failed(self, what: str, error: BaseException) -> None:
        # Its text may hold secrets, and nobody here knows them.
        kind = type(error).__name__
        log.error("method failed", extra=fields(connector=self._name, method=what, error=kind))

    # The reader.

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                request = decode_request(data)
                with self._changed:
                    self._where = self._where.after_receiving(request.kind)
                    self._changed.wait_for(
                        lambda: self._broken is not None or self._waiting["in"] < WAITING_BYTES
                    )
                    if self._broken is not None:
                        return
                    self._requests.append((request, len(data)))
                    self._waiting["in"] += len(data)
                    self._changed.notify_all()
            with self._changed:
                self._where.check_end()
                self._said_all = True
                self._changed.notify_all()
        except ProtocolError as error:
            self.break_off(error)
        except Exception as error:  # noqa: BLE001 - gRPC raises many things when a line is cut
            self.break_off(BrokenOff(f"the line was cut: {error}"))

    def _next(self, patience_s: float | None = None) -> Request | None:
        """The next request; none if the runtime says no more."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._requests or self._said_all or self._broken is not None, patience_s
            ):
                raise Overdue(
                    f"no Open came within {patience_s:g} seconds",
                    hint="Send it as soon as the stream is there.",
                )
            if self._broken is not None:
                raise self._broken
            if not self._requests:
                return None
            request, size = self._requests.popleft()
            self._waiting["in"] -= size
            self._changed.notify_all()
            return request

    def _unread(self, request: Request) -> None:
        with self._changed:
            self._requests.appendleft((request, 0))

    # The driver.

    def _drive(self) -> None:
        try:
            self._transact()
        except BaseException as error:  # noqa: BLE001 - told to the runtime, by whoever called us
            self.error = self._broken or error
        finally:
            self._close()
            self.finished.set()
            self._ended(self)
            with self._changed:
                self._over = True
                self._requests.clear()
                self._changed.notify_all()

    def _close(self) -> None:
        if self._transactor is None:
            return
        try:
            self._transactor.close()
        except Exception as error:  # noqa: BLE001 - told to the runtime, if nothing else is
            self._failed("close", error)
            self.error = self.error or error

    def _transact(self) -> None:
        opening = self._next(OPEN_S)
        if opening is None:
            return
        assert isinstance(opening, Open)  # By the table.
        transactor, bindings = self._open(opening, self)
        self._transactor = transactor
        # SUBTLE: who broke us off meanwhile found no transactor to cancel.
        self.must_go_on()
        last: Any = transactor.checkpoint
        if not isinstance(last, bytes):
            raise ContractBroken(f"the transactor's checkpoint is a {type(last).__name__}")
        self._answer(Opened(last))
        while (request := self._next()) is not None:
            assert request.kind is Kind.ACKNOWLEDGE
            transactor.acknowledge()
            self._answer(Acknowledged())
            first = self._next()
            if first is None:
                return
            self._unread(first)
            self._load(transactor, bindings)
            self._answer(Flushed())
            checkpoint = self._store(transactor, bindings)
            self.must_go_on()
            self._answer(StartedCommit(self._state(transactor.start_commit(checkpoint))))

    def must_go_on(self) -> None:
        """Whoever was broken off and did not notice must not commit."""
        with self._changed:
            if self._broken is not None:
                raise self._broken

    def _load(self, transactor: Transactor, bindings: list[Binding[Any]]) -> None:
        keys = _Loads(self, bindings)
        for found in transactor.load(iter(keys)):
            if not isinstance(found, Found):
                raise ContractBroken(f"load yielded a {type(found).__name__}, not a Found")
            keys.answered(found)
            for docs in _parted(found.docs_json):
                self._answer(Loaded(found.binding.index, docs))
        if not keys.flushed:
            raise ContractBroken(
                "load ended before it had taken all keys",
                hint="Take every batch of the iterator; it ends by itself.",
            )

    def _store(self, transactor: Transactor, bindings: list[Binding[Any]]) -> bytes:
        documents = _Stores(self, bindings, accepts_empty=transactor.accepts_empty)
        transactor.store(iter(documents))
        if documents.checkpoint is None:
            raise ContractBroken(
                "store ended before it had taken all documents",
                hint="Take every batch of the iterator; it ends by itself.",
            )
        return documents.checkpoint

    def _state(self, update: Any) -> StateUpdate | None:
        if update is None:
            return None
        if not isinstance(update, StateUpdate):
            raise ContractBroken(f"start_commit returned a {type(update).__name__}")
        if not is_json_object(update.json):
            raise ContractBroken("start_commit returned connector state that is no JSON object")
        return update

    def _answer(self, response: Response) -> None:
        data = encode_response(response)
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken is not None or self._waiting["out"] < WAITING_BYTES
            )
            if self._broken is not None:
                raise self._broken
            self._where = self._where.after_sending(response.kind)
            self._responses.append(data)
            self._waiting["out"] += len(data)
            self._changed.notify_all()


class _Loads:
    """The keys of one load phase, as they come."""

    def __init__(self, stream: Stream, bindings: list[Binding[Any]]) -> None:
        self._stream = stream
        self._bindings = bindings
        self._asked: dict[int, int] = {}
        self._once = EachOnce("asked for", "A runtime asks for a key once, and keeps the answer.")
        self.flushed = False

    def __iter__(self) -> Iterator[Keys]:
        while True:
            request = self._stream._next()
            if request is None:
                raise RemoteProtocolError("unexpected EOF when there are loaded keys")
            if isinstance(request, Flush):
                self._once.check()
                self.flushed = True
                return
            assert isinstance(request, Load)
            binding = _bound(self._bindings, request.binding, "Load")
            if binding.delta_updates:
                raise RemoteProtocolError(
                    f"Load of {binding}, which is a binding of delta updates",
                    hint="Such a binding is stored to, and never loaded from.",
                )
            self._asked[binding.index] = self._asked.get(binding.index, 0) + len(
                request.packed_keys
            )
            self._once.add(binding, request.packed_keys)
            yield Keys(binding, request.packed_keys)

    def answered(self, found: Found) -> None:
        """Hold the connector to what was asked for."""
        docs = found.docs_json
        if not isinstance(docs, pa.BinaryArray) or docs.null_count:
            raise ContractBroken(
                f"load found documents of {found.binding} that are no column of bytes",
                detail=f"They are a {type(docs).__name__}.",
                hint="Give a pyarrow BinaryArray, without nulls: leave out what is not there.",
            )
        left = self._asked.get(found.binding.index, 0) - len(docs)
        if left < 0:
            raise ContractBroken(f"load found more documents of {found.binding} than asked for")
        self._asked[found.binding.index] = left


class _Stores:
    """The documents of one store phase, as they come."""

    def __init__(
        self, stream: Stream, bindings: list[Binding[Any]], *, accepts_empty: bool
    ) -> None:
        self._stream = stream
        self._bindings = bindings
        self._accepts_empty = accepts_empty
        self._stored: set[int] = set()
        self._once = EachOnce(
            "stored", "A runtime combines the documents of a key before it stores them."
        )
        self.checkpoint: bytes | None = None

    def __iter__(self) -> Iterator[Documents]:
        while True:
            request = self._stream._next()
            if request is None:
                raise RemoteProtocolError("unexpected EOF before StartCommit")
            if isinstance(request, StartCommit):
                self._once.check()
                self.checkpoint = request.checkpoint
                return
            assert isinstance(request, Store)
            binding = _bound(self._bindings, request.binding, "Store")
            if request.empties:
                self._may_empty(binding)
            elif not binding.delta_updates:
                self._once.add(binding, request.packed_keys)
            self._stored.add(binding.index)
            yield Documents(
                binding,
                request.packed_keys,
                request.packed_values,
                request.docs_json,
                request.exists,
                request.deletes,
                request.empties,
            )

    def _may_empty(self, binding: Binding[Any]) -> None:
        what = f"Store empties {binding}"
        if not self._accepts_empty:
            raise RemoteProtocolError(f"{what}, which does not accept it")
        if self._stream.key_range != WHOLE:
            raise RemoteProtocolError(
                f"{what} for a shard of {self._stream.key_range}",
                detail="Which documents are of other shards, nobody knows here.",
            )
        if binding.index in self._stored:
            raise RemoteProtocolError(f"{what}, and is not the first of it in its transaction")


def _bound(bindings: list[Binding[Any]], index: int, what: str) -> Binding[Any]:
    if index >= len(bindings):
        raise RemoteProtocolError(f"{what} of binding {index}; there are {len(bindings)}")
    return bindings[index]


def _parted(docs: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """In runs of about `MESSAGE_BYTES`; a document that is larger is alone."""
    if docs.nbytes <= MESSAGE_BYTES:
        if len(docs):
            yield docs
        return
    begin = size = 0
    for row, length in enumerate(pc.binary_length(docs).to_pylist()):
        if row > begin and size + length > MESSAGE_BYTES:
            yield docs.slice(begin, row - begin)
            begin, size = row, 0
        size += length
    yield docs.slice(begin)


def superseded(materialization: str, key_range: KeyRange) -> Exception:
    """What an older stream is told."""
    return Fenced(
        f'a newer stream of materialization "{materialization}" has taken over {key_range}',
        hint="Stop; the other one goes on.",
    )
