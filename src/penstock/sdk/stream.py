"""One Transactions stream and its two threads.

    gRPC ─ bytes ─► reader thread ─ request queue ─► transactor thread ─► transactor
         ◄─ bytes ─ response queue ◄───────────────────────┘

The reader decodes requests and checks their order. It stops reading while the queue is full, so
Loads can arrive during a commit and memory is bounded. The transactor thread calls the methods of
the transactor in order.

The runtime, a failed connection or a newer stream can cancel the stream. Then `Transactor.cancel`
is called at once; during `Connector.open`, the event `cancelled` is set instead. The transactor
thread closes the transactor, which rolls back.
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
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from penstock.sdk.bindings import Binding
from penstock.sdk.duplicate_keys import DuplicateKeyCheck
from penstock.sdk.errors import ContractBroken, DeadlineExceeded, StreamCancelled
from penstock.sdk.transactor import Transactor
from penstock.telemetry import fields, logger

__all__ = ["Opener", "Stream"]

log = logger("sdk")

WAITING_BYTES: Final = 32 << 20
"""Maximum size of each queue. A full queue blocks its sender."""

MESSAGE_BYTES: Final = 1 << 20
"""Approximate size of Loaded messages."""

OPEN_S: Final = 60.0
"""Time limit for Open. A stream without Open occupies a thread."""

Opener = Callable[[Open, "Stream"], tuple[Transactor, list[Binding[Any]]]]
"""Opens the transactor of a stream, and returns it with its bindings."""


class Stream:
    """One stream, from its first request to its end."""

    def __init__(self, name: str, opener: Opener, ended: Callable[["Stream"], None]) -> None:
        """Create a stream. `ended` is called after the transactor is closed, in all cases."""
        self._name = name
        self._open = opener
        self._ended = ended
        self._order = Transaction(Role.CONNECTOR)
        self._changed = threading.Condition()
        self._requests: deque[tuple[Request, int]] = deque()
        self._responses: deque[bytes] = deque()
        self._waiting = {"in": 0, "out": 0}
        self._end_of_requests = False
        """True after the last request of the runtime."""

        self._over = False
        """True after the transactor thread has ended. `error` is its exception, if any."""

        self._cancelled_by: Exception | None = None
        self.cancelled = threading.Event()
        self._transactor: Transactor | None = None
        self.error: BaseException | None = None
        self.key_range: KeyRange | None = None
        self.finished = threading.Event()
        """Set once the transactor is closed."""

    # Called by gRPC.

    def run(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the responses to `requests`, until the stream ends or is cancelled."""
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        threading.Thread(target=self._run_transactor, daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._responses
                        or self._over
                        or isinstance(self._cancelled_by, StreamCancelled)
                    )
                )
                if not self._responses:
                    self.error = self.error or self._cancelled_by
                    return
                data = self._responses.popleft()
                self._waiting["out"] -= len(data)
                self._changed.notify_all()
            yield data

    def cancel(self, reason: Exception) -> None:
        """End the stream at once, and roll back the uncommitted transaction."""
        with self._changed:
            if self._cancelled_by is None:
                self._cancelled_by = reason
            self._changed.notify_all()
        self.cancelled.set()
        # In a thread of its own, because the caller may be a thread of gRPC that serves all calls.
        if self._transactor is not None:
            threading.Thread(
                target=self._cancel_transactor, args=(self._transactor,), daemon=True
            ).start()

    def _cancel_transactor(self, transactor: Transactor) -> None:
        if self.finished.is_set():
            return
        try:
            transactor.cancel()
        except Exception as error:  # noqa: BLE001 - the stream ends in any case
            self._log_failure("cancel", error)

    def _log_failure(self, method: str, error: BaseException) -> None:
        # The text may contain secrets, which are not known here.
        kind = type(error).__name__
        log.error("method failed", extra=fields(connector=self._name, method=method, error=kind))

    # The reader thread.

    def _read(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                request = decode_request(data)
                with self._changed:
                    self._order = self._order.after_receiving(request.kind)
                    self._changed.wait_for(
                        lambda: (
                            self._cancelled_by is not None or self._waiting["in"] < WAITING_BYTES
                        )
                    )
                    if self._cancelled_by is not None:
                        return
                    self._requests.append((request, len(data)))
                    self._waiting["in"] += len(data)
                    self._changed.notify_all()
            with self._changed:
                self._order.check_end()
                self._end_of_requests = True
                self._changed.notify_all()
        except ProtocolError as error:
            self.cancel(error)
        except Exception as error:  # noqa: BLE001 - gRPC raises various types
            self.cancel(StreamCancelled(f"connection to the runtime was lost: {error}"))

    def _next(self, timeout_s: float | None = None) -> Request | None:
        """Return the next request; None after the last."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._requests or self._end_of_requests or self._cancelled_by is not None,
                timeout_s,
            ):
                raise DeadlineExceeded(
                    f"Open was not sent within {timeout_s:g} seconds",
                    hint="Send Open as soon as the stream exists.",
                )
            if self._cancelled_by is not None:
                raise self._cancelled_by
            if not self._requests:
                return None
            request, size = self._requests.popleft()
            self._waiting["in"] -= size
            self._changed.notify_all()
            return request

    def _unread(self, request: Request) -> None:
        with self._changed:
            self._requests.appendleft((request, 0))

    # The transactor thread.

    def _run_transactor(self) -> None:
        try:
            self._transact()
        except BaseException as error:  # noqa: BLE001 - reported to the runtime
            self.error = self._cancelled_by or error
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
        except Exception as error:  # noqa: BLE001 - reported to the runtime
            self._log_failure("close", error)
            self.error = self.error or error

    def _transact(self) -> None:
        first = self._next(OPEN_S)
        if first is None:
            return
        assert isinstance(first, Open)  # Guaranteed by the order of messages.
        transactor, bindings = self._open(first, self)
        self._transactor = transactor
        # SUBTLE: a cancellation during open had no transactor to cancel.
        self.check_not_cancelled()
        last: Any = transactor.checkpoint
        if not isinstance(last, bytes):
            raise ContractBroken(
                f"checkpoint of the transactor is a {type(last).__name__}, not bytes"
            )
        self._respond(Opened(last))
        while (request := self._next()) is not None:
            assert request.kind is Kind.ACKNOWLEDGE
            transactor.acknowledge()
            self._respond(Acknowledged())
            following = self._next()
            if following is None:
                return
            self._unread(following)
            self._load(transactor, bindings)
            self._respond(Flushed())
            checkpoint = self._store(transactor, bindings)
            self.check_not_cancelled()
            self._respond(StartedCommit(self._state(transactor.start_commit(checkpoint))))

    def check_not_cancelled(self) -> None:
        """Raise if the stream was cancelled: it must not commit."""
        with self._changed:
            if self._cancelled_by is not None:
                raise self._cancelled_by

    def _load(self, transactor: Transactor, bindings: list[Binding[Any]]) -> None:
        keys = _Loads(self, bindings)
        for loaded in transactor.load(iter(keys)):
            if not isinstance(loaded, LoadedDocuments):
                raise ContractBroken(
                    f"load yielded a {type(loaded).__name__}, not a LoadedDocuments"
                )
            keys.check_loaded(loaded)
            for docs in _split_into_messages(loaded.docs_json):
                self._respond(Loaded(loaded.binding.index, docs))
        if not keys.flushed:
            raise ContractBroken(
                "load returned before the end of its keys",
                hint="Consume the iterator of keys to its end.",
            )

    def _store(self, transactor: Transactor, bindings: list[Binding[Any]]) -> bytes:
        documents = _Stores(self, bindings, accepts_empty=transactor.accepts_empty)
        transactor.store(iter(documents))
        if documents.checkpoint is None:
            raise ContractBroken(
                "store returned before the end of its documents",
                hint="Consume the iterator of documents to its end.",
            )
        return documents.checkpoint

    def _state(self, update: Any) -> StateUpdate | None:
        if update is None:
            return None
        if not isinstance(update, StateUpdate):
            raise ContractBroken(
                f"start_commit returned a {type(update).__name__}, not a StateUpdate"
            )
        if not is_json_object(update.json):
            raise ContractBroken("connector state of start_commit is not a JSON object")
        return update

    def _respond(self, response: Response) -> None:
        data = encode_response(response)
        with self._changed:
            self._changed.wait_for(
                lambda: self._cancelled_by is not None or self._waiting["out"] < WAITING_BYTES
            )
            if self._cancelled_by is not None:
                raise self._cancelled_by
            self._order = self._order.after_sending(response.kind)
            self._responses.append(data)
            self._waiting["out"] += len(data)
            self._changed.notify_all()


class _Loads:
    """Iterator over the keys of one load phase."""

    def __init__(self, stream: Stream, bindings: list[Binding[Any]]) -> None:
        self._stream = stream
        self._bindings = bindings
        self._requested: dict[int, int] = {}
        self._duplicates = DuplicateKeyCheck(
            "loaded", "Load a key once per transaction, and retain the document."
        )
        self.flushed = False

    def __iter__(self) -> Iterator[Keys]:
        while True:
            request = self._stream._next()
            if request is None:
                raise RemoteProtocolError("unexpected EOF after Load")
            if isinstance(request, Flush):
                self._duplicates.check()
                self.flushed = True
                return
            assert isinstance(request, Load)
            binding = _find_binding(self._bindings, request.binding, "Load")
            if binding.delta_updates:
                raise RemoteProtocolError(
                    f"Load of {binding}, which has delta updates",
                    hint="Do not load from bindings with delta updates.",
                )
            count = self._requested.get(binding.index, 0) + len(request.packed_keys)
            self._requested[binding.index] = count
            self._duplicates.add(binding, request.packed_keys)
            yield Keys(binding, request.packed_keys)

    def check_loaded(self, loaded: LoadedDocuments) -> None:
        """Check the type and the number of documents that `load` yielded."""
        docs = loaded.docs_json
        if not isinstance(docs, pa.BinaryArray) or docs.null_count:
            raise ContractBroken(
                f"load yielded documents of {loaded.binding} that are not a column of bytes",
                detail=f"The type is {type(docs).__name__}, or the column contains nulls.",
                hint="Yield a pyarrow BinaryArray, and omit documents that do not exist.",
            )
        left = self._requested.get(loaded.binding.index, 0) - len(docs)
        if left < 0:
            raise ContractBroken(
                f"load yielded more documents of {loaded.binding} than were requested"
            )
        self._requested[loaded.binding.index] = left


class _Stores:
    """Iterator over the documents of one store phase."""

    def __init__(
        self, stream: Stream, bindings: list[Binding[Any]], *, accepts_empty: bool
    ) -> None:
        self._stream = stream
        self._bindings = bindings
        self._accepts_empty = accepts_empty
        self._stored: set[int] = set()
        self._duplicates = DuplicateKeyCheck(
            "stored", "Combine the documents of a key before they are stored."
        )
        self.checkpoint: bytes | None = None

    def __iter__(self) -> Iterator[Documents]:
        while True:
            request = self._stream._next()
            if request is None:
                raise RemoteProtocolError("unexpected EOF before StartCommit")
            if isinstance(request, StartCommit):
                self._duplicates.check()
                self.checkpoint = request.checkpoint
                return
            assert isinstance(request, Store)
            binding = _find_binding(self._bindings, request.binding, "Store")
            if request.empties:
                self._check_truncate(binding)
            elif not binding.delta_updates:
                self._duplicates.add(binding, request.packed_keys)
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

    def _check_truncate(self, binding: Binding[Any]) -> None:
        prefix = f"Store truncates {binding}"
        if not self._accepts_empty:
            raise RemoteProtocolError(f"{prefix}, but the connector does not support it")
        if self._stream.key_range != WHOLE:
            raise RemoteProtocolError(
                f"{prefix} in a stream of key range {self._stream.key_range}",
                detail="The connector cannot distinguish documents of other key ranges.",
            )
        if binding.index in self._stored:
            raise RemoteProtocolError(f"{prefix} after other documents of the transaction")


def _find_binding(bindings: list[Binding[Any]], index: int, message: str) -> Binding[Any]:
    if index >= len(bindings):
        raise RemoteProtocolError(
            f"{message} of binding {index}, but the number of bindings is {len(bindings)}"
        )
    return bindings[index]


def _split_into_messages(docs: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """Yield slices of about `MESSAGE_BYTES`. A larger document is a slice of its own."""
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


def taken_over(materialization: str, key_range: KeyRange) -> Exception:
    """Return the error of an older stream that a newer one has fenced."""
    return Fenced(
        f'newer stream of materialization "{materialization}" has taken over key range {key_range}',
        hint="Stop this process. The newer stream continues.",
    )
