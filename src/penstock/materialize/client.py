"""The gRPC line to a connector.

    connection = connect("unix:/run/sqlite.sock")
    stream = connection.transactions()
    stream.send(Open(…)); stream.receive()  ▸ Opened(…)

A stream is sent to and received from by two threads, or by one that takes turns.
`send` waits while much is under way, so a slow connector slows the sender and not
the memory. What the table of `protocol.transaction` forbids is refused before it
is sent, and named when it comes. An answer is not waited for without end (`patience_s`).

A connector of the older generation has no Acknowledge, and hears of the checkpoint
in Prepare, which is our Flush. To it an Acknowledge is not sent; that its answer
to Commit came is the acknowledgement, and a Load is not sent before that.
"""

import enum
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

import grpc

from penstock.materialize.errors import ConnectorError, ConnectorRefused, ConnectorUnreachable
from penstock.pipeline.redaction import redact
from penstock.protocol.errors import LocalProtocolError
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Applied,
    Apply,
    Kind,
    Open,
    Request,
    Response,
    Spec,
    SpecAnswer,
    StartCommit,
    Validate,
    Validated,
)
from penstock.protocol.privacy import Security, is_private, read_pem
from penstock.protocol.transaction import NOTHING, Role, Transaction
from penstock.protocol.wire import (
    METHODS,
    decode,
    decode_response,
    encode,
    encode_commit,
    encode_request,
)

__all__ = ["Connection", "Generation", "Stream", "connect"]

UNLIMITED: Final = -1
UNDER_WAY_BYTES: Final = 16 << 20
"""So much may be sent and not yet taken, before `send` waits."""

ANSWER_S: Final = 60.0
APPLY_S: Final = 3_600.0
"""A table that is written anew takes a while, and goes on though nobody waits for it."""

OPENED_S: Final = 120.0
PATIENCE_S: Final = 3_600.0
"""As long as a large transaction may take to be loaded, committed or applied."""

_T = TypeVar("_T")


class Generation(enum.Enum):
    """How a connector speaks of commits."""

    START_COMMIT = "StartCommit and Acknowledge"
    PREPARE = "Prepare and Commit"


def connect(
    address: str,
    security: Security | None = None,
    *,
    generation: Generation = Generation.START_COMMIT,
    patience_s: float | None = PATIENCE_S,
) -> "Connection":
    """A line to the connector at `address`: `host:port`, or `unix:PATH`.

    A stream is given up if an answer is awaited and nothing at all is said for `patience_s`,
    or for two minutes while it is being opened. It may take twice as long to be noticed.

    Raises:
        UsageError: the line would not be private.
    """
    return Connection(address, security or Security(), generation, patience_s)


class Connection:
    """A connector, as its runtime sees it."""

    def __init__(
        self,
        address: str,
        security: Security,
        generation: Generation,
        patience_s: float | None = PATIENCE_S,
    ) -> None:
        security.check(address)
        self._patience_s = patience_s
        self.address = address
        self.generation = generation
        self._metadata = security.metadata
        self._channel = _channel(address, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; streams that are open are cancelled."""
        self._channel.close()

    def spec(self, request: Spec | None = None) -> SpecAnswer:
        """What can be configured."""
        return self._ask("Spec", request or Spec(), SpecAnswer)

    def validate(self, request: Validate) -> Validated:
        """Whether this could be materialized, and with which fields."""
        return self._ask("Validate", request, Validated)

    def apply(self, request: Apply) -> Applied:
        """Make the endpoint fit.

        A connector that knows only Apply is one of the older generation, and is
        spoken to as such from then on.
        """
        if self.generation is Generation.START_COMMIT:
            try:
                return self._ask("ApplyUpsert", request, Applied, APPLY_S)
            except ConnectorError as error:
                if not _unimplemented(error):
                    raise
            self.generation = Generation.PREPARE
        return self._ask("Apply", request, Applied, APPLY_S)

    def delete(self, request: Apply) -> Applied:
        """Take away what was applied."""
        return self._ask("ApplyDelete", request, Applied, APPLY_S)

    def transactions(self, *, checked: bool = True) -> "Stream":
        """A stream of transactions; `checked` is whether both ends are held to the table."""
        method = self._channel.stream_stream(METHODS + "Transactions")
        return Stream(
            self.address,
            method,
            self._metadata,
            self.generation,
            checked=checked,
            patience_s=self._patience_s,
        )

    def _ask(self, method: str, request: Any, answer: type[_T], patience_s: float = ANSWER_S) -> _T:
        ask = self._channel.unary_unary(METHODS + method)
        try:
            data = ask(encode(request), timeout=patience_s, metadata=self._metadata)
        except grpc.RpcError as error:
            config = _config(request)
            cause = _cause(error, config)
            raise _translated(error, self.address, method, config) from cause
        return decode(answer, data)


class Stream:
    """One Transactions stream."""

    def __init__(
        self,
        address: str,
        method: Any,
        metadata: Any,
        generation: Generation,
        *,
        checked: bool,
        patience_s: float | None,
    ) -> None:
        self._address = address
        self._patience_s = patience_s
        self._older = generation is Generation.PREPARE
        self._checked = checked
        self._where = Transaction(Role.RUNTIME)
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._config: Mapping[str, Any] = {}
        """Endpoint and resources as Open sent them; errors do not show their secrets."""

        self._said_all = False
        self._over = False
        self._ended = threading.Event()
        self._said = 0
        """So many messages were sent, or waited for."""

        self._receiving = False
        self._overdue: ConnectorUnreachable | None = None
        self._heard: SimpleQueue[Response | Exception | None] | None = None
        self._call = method(self._sent(), metadata=metadata)
        if self._older:
            self._heard = SimpleQueue()
            threading.Thread(target=self._hear, name="older connector", daemon=True).start()
        if not self._call.add_callback(self._is_over):
            self._is_over()
        if patience_s is not None and checked:
            threading.Thread(target=self._watch, args=(patience_s,), daemon=True).start()

    def send(self, request: Request) -> None:
        """Send, as soon as there is room.

        Raises:
            LocalProtocolError: it may not be sent now.
            ConnectorError: the stream is over; this is why.
        """
        if isinstance(request, Open):
            self._config = _config(request)
        with self._changed:
            self._said += 1
            if self._checked:
                self._where = self._where.sends(request.kind)
        if self._older and isinstance(request, Acknowledge):
            assert self._heard is not None
            self._heard.put(Acknowledged())
            return
        data = encode_request(request)
        self.send_bytes(
            encode_commit() if self._older and isinstance(request, StartCommit) else data
        )

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are, whatever they mean."""
        with self._changed:
            if self._said_all:
                raise LocalProtocolError("nothing may be sent after the end of the stream")
            room = self._changed.wait_for(
                lambda: self._over or self._waiting_bytes < UNDER_WAY_BYTES or not self._waiting,
                self._patience_s,
            )
            if room and not self._over:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()
                return
        if not room:
            self._give_up("it takes nothing of what is sent", self._patience_s)
        raise self._cause()

    def receive(self) -> Response | None:
        """The next response; none if the connector has ended the stream.

        Raises:
            RemoteProtocolError: it may not come now, or is no message.
            ConnectorUnreachable: it did not come in time.
            ConnectorError: the connector, or the line to it, failed.
        """
        with self._changed:
            self._said, self._receiving = self._said + 1, True
        try:
            response = self._heard.get() if self._heard is not None else self._next()
        finally:
            self._receiving = False
        if response is None:
            return None
        if isinstance(response, Exception):
            raise response
        with self._changed:
            if self._checked:
                self._where = self._where.receives(response.kind)
        return response

    def _next(self) -> Response | None:
        try:
            data = next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            if self._overdue is not None:
                raise self._overdue from None
            cause = _cause(error, self._config)
            raise _translated(error, self._address, "Transactions", self._config) from cause
        return decode_response(data)

    def _hear(self) -> None:
        """Of an older connector: what it says, among what it does not say but means."""
        assert self._heard is not None
        while True:
            try:
                response: Response | Exception | None = self._next()
            except Exception as error:  # noqa: BLE001 - raised by whoever receives
                response = error
            self._heard.put(response)
            if response is None or isinstance(response, Exception):
                return

    def _watch(self, patience_s: float) -> None:
        """Give up if an answer is awaited, and nothing was said from one look to the next."""
        said, why, pause_s = 0, "", patience_s
        while not why:
            pause_s = min(patience_s, OPENED_S) if self._where.response is NOTHING else patience_s
            if self._ended.wait(pause_s):
                return
            with self._changed:
                if said == self._said and self._receiving:
                    if self._said_all:
                        why = "it does not end the stream, though we did"
                    elif self._where.awaited is not None:
                        why = f"{self._where.awaited} did not come after {self._where.request}"
                said = self._said
        self._give_up(why, pause_s)

    def _give_up(self, why: str, after_s: float | None) -> None:
        self._overdue = ConnectorUnreachable(
            f"the connector at {self._address} does not go on: {why}",
            detail=f"That was so for {after_s:g} seconds.",
            hint="See what it is doing; if that may take longer, give `connect` more patience_s.",
        )
        self._call.cancel()

    def end(self) -> None:
        """Say that no more requests will come."""
        with self._changed:
            self._said += 1
            self._said_all = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Break off; a connector rolls back what it has begun."""
        self._call.cancel()

    @property
    def over(self) -> bool:
        """Whether nothing more can be said, by whoever's doing."""
        return self._over

    @property
    def idle(self) -> bool:
        """Whether no transaction is under way."""
        return self._where.idle

    @property
    def acknowledged(self) -> bool:
        """Whether the connector has acknowledged the last commit, so that a Flush may follow."""
        return self._where.response in (Kind.ACKNOWLEDGED, Kind.LOADED)

    def _sent(self) -> Iterator[bytes]:
        """What gRPC takes, in a thread of its own."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._said_all or self._over)
                if self._over or not self._waiting:
                    return
                data = self._waiting.popleft()
                self._waiting_bytes -= len(data)
                self._changed.notify_all()
            yield data

    def _is_over(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._ended.set()

    def _cause(self) -> Exception:
        """Why the stream is over."""
        if self._overdue is not None:
            return self._overdue
        if isinstance(self._call, grpc.RpcError) and self._call.code() is not grpc.StatusCode.OK:
            return _translated(self._call, self._address, "Transactions", self._config)
        return ConnectorError(f"the connector at {self._address} ended the stream by itself")


def _channel(address: str, security: Security) -> grpc.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", UNLIMITED),
        ("grpc.max_receive_message_length", UNLIMITED),
        # Each line is its own: two of one process must not share fate.
        ("grpc.use_local_subchannel_pool", 1),
        # A connector that vanished without a word is noticed.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # What is said on this machine does not leave it.
        ("grpc.enable_http_proxy", 0 if is_private(address) else 1),
    ]
    if not security.tls:
        return grpc.insecure_channel(address, options=options)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    credentials = grpc.ssl_channel_credentials(
        read_pem(security.ca), read_pem(security.key), read_pem(security.certificate)
    )
    return grpc.secure_channel(address, credentials, options=options)


_UNREACHABLE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_REFUSED: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE,
)


_SETUP: Final = ("Spec", "Validate", "ApplyUpsert", "Apply")
"""Calls whose errors are rejections, unless the status says that they may pass: a connector that
knows no status returns UNKNOWN for a table that it cannot materialize."""

_TRANSIENT: Final = (
    *_UNREACHABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def _config(request: Spec | Validate | Apply | Open) -> Mapping[str, Any]:
    """Return the configuration in a request: endpoint and resources."""
    spec = request.materialization if isinstance(request, Apply | Open) else request
    bindings = () if isinstance(spec, Spec) else spec.bindings
    texts = [spec.endpoint_spec_json, *(binding.resource_spec_json for binding in bindings)]
    configs = []
    for text in texts:
        with suppress(ValueError):  # A test of a connector may send text that is not JSON.
            configs.append(json.loads(text))
    return {"configs": configs}


def _cause(error: grpc.RpcError, config: Mapping[str, Any]) -> grpc.RpcError | None:
    """Return an error as a cause that a traceback may print; None if it shows a secret."""
    details = error.details() or ""
    return error if redact(details, config) == details else None


def _translated(error: Any, address: str, method: str, config: Mapping[str, Any]) -> ConnectorError:
    """Return the error of a call, without the secrets of the configuration that was sent."""
    code, details = error.code(), redact(error.details() or "", config)
    if code in _UNREACHABLE:
        return ConnectorUnreachable(
            f"no answer from the connector at {address}",
            detail=f"{method}: {details}.",
            hint="Is it running, and is the address the one it listens on? If it speaks TLS, it "
            "must be spoken to with certificates.",
        )
    rejected = code in _REFUSED or (method in _SETUP and code not in _TRANSIENT)
    kind = ConnectorRefused if rejected else ConnectorError
    message, _, rest = details.partition("\n")
    detail, marked, hint = f"\n{rest}".rpartition("\nhint: ")
    found = kind(
        message or f"{method} failed",
        detail=detail.removeprefix("\n") if marked else rest,
        hint=hint if marked else "",
    )
    found.add_note(f"connector: {address}, {method}, {code.name}")
    return found


def _unimplemented(error: ConnectorError) -> bool:
    cause = error.__cause__ or error.__context__
    return isinstance(cause, grpc.RpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
