"""gRPC client of a connector.

    connection = connect("unix:/run/sqlite.sock")
    stream = connection.transactions()
    stream.send(Open(…)); stream.receive()  ▸ Opened(…)

One thread may send while another receives, or a single thread alternates. `send` blocks while
`BUFFERED_BYTES` are buffered: a slow connector slows the sender, and memory stays bounded.
`protocol.transaction` holds the table of valid message orders. The client rejects a request that
violates the table before it is sent, and raises an error for such a response.

Every wait is bounded. If no message is sent, taken or received for the answer deadline, the client
tries to establish a second connection to the connector:

    fails within the deadline    the process or its host hangs; the call is cancelled
    succeeds                     the connector is busy, for example with a commit; the wait
                                 continues, up to `patience_s`

A connector of the older generation has no Acknowledge. It receives the checkpoint in Prepare, which
corresponds to Flush. The client sends no Acknowledge to it. Its response to Commit is the
acknowledgement, and the client sends no Load before that response.
"""

import enum
import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar

import grpc

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import answer_timeout_s, stop_timeout_s
from penstock.materialize.errors import (
    ConnectorError,
    ConnectorFailed,
    ConnectorRefused,
    ConnectorUnreachable,
)
from penstock.materialize.run_certificate import SERVER_NAME
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
    SpecResponse,
    StartCommit,
    Validate,
    Validated,
)
from penstock.protocol.redaction import redact, secret_fields
from penstock.protocol.transaction import NOTHING, Role, Transaction
from penstock.protocol.transport_security import Security, is_private, read_pem
from penstock.protocol.wire import (
    METHODS,
    decode,
    decode_response,
    encode,
    encode_commit,
    encode_request,
)

__all__ = ["ConnectorConnection", "ConnectorStream", "Generation", "connect"]

UNLIMITED: Final = -1
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_OTHERS_MS: Final = 5 * 60_000
"""Keepalive interval for connectors that this process has not started.

SUBTLE: a shorter interval breaks long requests. By default, gRPC servers in all languages close a
connection with more frequent pings while they process a request without sending data.
"""

SLICE_S: Final = 0.2
"""Longest wait between two checks of the stop event."""

BUFFERED_BYTES: Final = 16 << 20
"""Bytes that may be buffered and not yet taken by gRPC before `send` blocks."""

ANSWER_S: Final = 60.0
APPLY_S: Final = 3_600.0
"""Timeout of Apply. A table rewrite is slow, and continues even if the client stops waiting."""

OPENED_S: Final = 120.0
PATIENCE_S: Final = 3_600.0
"""Longest silence of a connector that loads, commits or applies a large transaction."""

_T = TypeVar("_T")


class Generation(enum.Enum):
    """Version of the commit messages of a connector."""

    START_COMMIT = "StartCommit and Acknowledge"
    PREPARE = "Prepare and Commit"


def connect(
    address: str,
    security: Security | None = None,
    *,
    generation: Generation = Generation.START_COMMIT,
    patience_s: float | None = PATIENCE_S,
    stop: threading.Event | None = None,
) -> "ConnectorConnection":
    """Return a connection to the connector at `address`: `host:port`, or `unix:PATH`.

    A stream is cancelled in two cases while a response is awaited:

    - No message is sent or received for `patience_s`, or for two minutes during Open.
    - No message is sent or received for the answer deadline, and the connector accepts no second
      connection.

    Detection may take twice as long. A call other than a stream is cancelled a third of the stop
    deadline after `stop` is set.

    Raises:
        UsageError: the connection would not be private.
    """
    return ConnectorConnection(address, security or Security(), generation, patience_s, stop)


class ConnectorConnection:
    """Connection of the runtime to one connector."""

    def __init__(
        self,
        address: str,
        security: Security,
        generation: Generation,
        patience_s: float | None = PATIENCE_S,
        stop: threading.Event | None = None,
    ) -> None:
        security.check(address)
        self._patience_s = patience_s
        self._security = security
        self._stop = stop
        self.address = address
        self.generation = generation
        self._metadata = security.metadata
        self._channel = _channel(address, security)
        self._marked: Collection[str] | None = None
        """Properties that the schemas of the connector mark as secret; None until they are read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel its open streams."""
        self._channel.close()

    def spec(self, request: Spec | None = None) -> SpecResponse:
        """Return the config schemas of the connector."""
        answer = self._request("Spec", request or Spec(), SpecResponse)
        self._marked = secret_fields(
            answer.endpoint_spec_schema_json, answer.resource_spec_schema_json
        )
        return answer

    def validate(self, request: Validate) -> Validated:
        """Return the constraints on the fields of each binding, with secrets redacted."""
        redact_text = self._redaction(request)
        answer = self._request("Validate", request, Validated)
        return replace(
            answer,
            bindings=tuple(
                replace(
                    binding,
                    constraints={
                        field: replace(constraint, reason=redact_text(constraint.reason))
                        for field, constraint in binding.constraints.items()
                    },
                    recreates=redact_text(binding.recreates),
                )
                for binding in answer.bindings
            ),
        )

    def apply(self, request: Apply) -> Applied:
        """Create or change the resources to match the specification.

        A connector that implements only Apply is of the older generation. The connection then
        uses that generation for all later calls.
        """
        if self.generation is Generation.START_COMMIT:
            try:
                return self._change("ApplyUpsert", request)
            except ConnectorError as error:
                if not _unimplemented(error):
                    raise
            self.generation = Generation.PREPARE
        return self._change("Apply", request)

    def delete(self, request: Apply) -> Applied:
        """Delete the applied resources."""
        return self._change("ApplyDelete", request)

    def transactions(self, *, checked: bool = True) -> "ConnectorStream":
        """Open a stream of transactions.

        If `checked`, the order of the messages of both sides is checked against the table.
        """
        self._read_marks()
        method = self._channel.stream_stream(METHODS + "Transactions")
        return ConnectorStream(
            self.address,
            method,
            self._metadata,
            self.generation,
            marked=self._marked,
            checked=checked,
            patience_s=self._patience_s,
            is_reachable=self.is_reachable,
        )

    def _change(self, method: str, request: Apply) -> Applied:
        redact_text = self._redaction(request)
        answer = self._request(method, request, Applied, APPLY_S)
        return replace(answer, action_description=redact_text(answer.action_description))

    def _redaction(self, request: Validate | Apply) -> Callable[[str], str]:
        """Return a function that redacts the secrets of `request` in texts of the response."""
        self._read_marks()
        config = _config(request)
        return lambda text: redact(text, config, self._marked) if text else text

    def _read_marks(self) -> None:
        """Read the schemas before the first secret is sent."""
        if self._marked is None:
            with suppress(ConnectorError):
                self.spec()

    def is_reachable(self) -> bool:
        """Return whether a second connection is established within the answer deadline.

        The gRPC library of the connector accepts connections even while the connector is busy.
        """
        with _channel(self.address, self._security) as channel:
            try:
                grpc.channel_ready_future(channel).result(answer_timeout_s())
            except grpc.FutureTimeoutError:
                return False
        return True

    def _request(
        self, method: str, request: Any, answer: type[_T], patience_s: float = ANSWER_S
    ) -> _T:
        send = self._channel.unary_unary(METHODS + method)
        call = send.future(encode(request), timeout=patience_s, metadata=self._metadata)
        try:
            data = self._result(call, method)
        except grpc.RpcError as error:
            details = redact(error.details() or "", _config(request), self._marked)
            raise _translated(error, self.address, method, details) from _cause(error, details)
        return decode(answer, data)

    def _result(self, call: Any, method: str) -> bytes:
        """Return the response to a call.

        Raises:
            grpc.RpcError: the call failed.
            ConnectorUnreachable: the connector hangs, or this process stops.
        """
        deadline_ms, grace_ms = answer_timeout_s() * 1_000, stop_timeout_s() / 3 * 1_000
        silent_ms, stopped_ms = SYSTEM_CLOCK.boot_ms(), None
        while True:
            try:
                data: bytes = call.result(SLICE_S)
            except grpc.FutureTimeoutError:
                pass
            else:
                return data
            now_ms = SYSTEM_CLOCK.boot_ms()
            if self._stop is not None and self._stop.is_set():
                stopped_ms = stopped_ms or now_ms
                if now_ms - stopped_ms >= grace_ms:
                    call.cancel()
                    raise ConnectorUnreachable(
                        f"stopped while waiting for the connector at {self.address}",
                        detail=f"{method} was not answered.",
                    )
            elif now_ms - silent_ms >= deadline_ms:
                if not self.is_reachable() and not call.done():
                    call.cancel()
                    raise _hangs(self.address, f"{method} was not answered", deadline_ms / 1_000)
                silent_ms = SYSTEM_CLOCK.boot_ms()


class ConnectorStream:
    """One Transactions stream."""

    def __init__(
        self,
        address: str,
        method: Any,
        metadata: Any,
        generation: Generation,
        *,
        marked: Collection[str] | None,
        checked: bool,
        patience_s: float | None,
        is_reachable: Callable[[], bool],
    ) -> None:
        self._address = address
        self._is_reachable = is_reachable
        self._patience_s = patience_s
        self._older = generation is Generation.PREPARE
        self._checked = checked
        self._transaction = Transaction(Role.RUNTIME)
        self._changed = threading.Condition()
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._config: Mapping[str, Any] = {}
        """Endpoint and resource configs of Open. Errors redact their secrets."""

        self._marked = marked
        self._half_closed = False
        self._over = False
        self._ended = threading.Event()
        self._progress = 0
        """Number of messages that were sent, taken by gRPC, or awaited."""

        self._receiving = False
        self._sending = False
        """True while `send` waits for buffer space."""

        self._overdue: ConnectorUnreachable | None = None
        self._responses: SimpleQueue[Response | Exception | None] | None = None
        try:
            self._call = method(self._requests(), metadata=metadata)
        except ValueError as error:  # Another thread has cancelled the session.
            raise ConnectorUnreachable(
                f"connection to the connector at {address} is closed"
            ) from error
        if self._older:
            self._responses = SimpleQueue()
            threading.Thread(
                target=self._receive_responses, name="older connector", daemon=True
            ).start()
        if not self._call.add_callback(self._is_over):
            self._is_over()
        if patience_s is not None and checked:
            threading.Thread(target=self._watch, args=(patience_s,), daemon=True).start()

    def send(self, request: Request) -> None:
        """Send a request; block until the buffer has space.

        Raises:
            LocalProtocolError: the request is out of order.
            ConnectorError: the stream has ended. The error gives the cause.
        """
        if isinstance(request, Open):
            self._config = _config(request)
        with self._changed:
            self._progress += 1
            if self._checked:
                self._transaction = self._transaction.after_sending(request.kind)
        if self._older and isinstance(request, Acknowledge):
            assert self._responses is not None
            self._responses.put(Acknowledged())
            return
        data = encode_request(request)
        self.send_bytes(
            encode_commit() if self._older and isinstance(request, StartCommit) else data
        )

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message without any check of its content or order."""
        with self._changed:
            if self._half_closed:
                raise LocalProtocolError("request sent after the half-close of the stream")
            self._sending = True
            has_space = self._changed.wait_for(
                lambda: self._over or self._buffered_bytes < BUFFERED_BYTES or not self._buffer,
                self._patience_s,
            )
            self._sending = False
            if has_space and not self._over:
                self._buffer.append(data)
                self._buffered_bytes += len(data)
                self._changed.notify_all()
                return
        if not has_space:
            self._give_up("it accepts no request", self._patience_s)
        raise self._cause()

    def receive(self) -> Response | None:
        """Return the next response; None if the connector has ended the stream.

        Raises:
            RemoteProtocolError: the response is out of order, or is not a message.
            ConnectorUnreachable: the response did not arrive in time.
            ConnectorError: the connector or the connection to it failed.
        """
        with self._changed:
            self._progress, self._receiving = self._progress + 1, True
        try:
            response = self._responses.get() if self._responses is not None else self._next()
        finally:
            self._receiving = False
        if response is None:
            return None
        if isinstance(response, Exception):
            raise response
        with self._changed:
            if self._checked:
                self._transaction = self._transaction.after_receiving(response.kind)
        return response

    def _next(self) -> Response | None:
        try:
            data = next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            if self._overdue is not None:
                raise self._overdue from None
            details = self._details(error)
            raise _translated(error, self._address, "Transactions", details) from _cause(
                error, details
            )
        return decode_response(data)

    def _receive_responses(self) -> None:
        """Queue the responses of an older connector.

        `send` adds the Acknowledged responses that such a connector omits.
        """
        assert self._responses is not None
        while True:
            try:
                response: Response | Exception | None = self._next()
            except Exception as error:  # noqa: BLE001 - `receive` raises it
                response = error
            self._responses.put(response)
            if response is None or isinstance(response, Exception):
                return

    def _watch(self, patience_s: float) -> None:
        """Cancel the stream if a message is awaited and the connector hangs or is silent."""
        progress, silent_s = 0, 0.0
        while True:
            limit_s = (
                min(patience_s, OPENED_S) if self._transaction.response is NOTHING else patience_s
            )
            pause_s = min(limit_s, answer_timeout_s())
            if self._ended.wait(pause_s):
                return
            with self._changed:
                awaited = self._awaited()
                silent_s = silent_s + pause_s if awaited and progress == self._progress else 0.0
                progress = self._progress
            if silent_s >= limit_s:
                self._give_up(awaited, limit_s)
                return
            if silent_s and not self._is_reachable():
                with self._changed:
                    hangs = progress == self._progress and self._awaited() == awaited
                if hangs:
                    self._overdue = _hangs(self._address, awaited, silent_s)
                    self._call.cancel()
                    return

    def _awaited(self) -> str:
        """Return a clause about the overdue message; empty if no message is awaited."""
        if self._sending:
            return "it accepts no request"
        if self._receiving and self._half_closed:
            return "it does not end the stream after our half-close"
        if self._receiving and self._transaction.awaited_response is not None:
            awaited, request = self._transaction.awaited_response, self._transaction.request
            return f"{awaited} did not arrive after {request}"
        return ""

    def _give_up(self, why: str, after_s: float | None) -> None:
        self._overdue = ConnectorUnreachable(
            f"connector at {self._address} makes no progress: {why}",
            detail=f"The wait was {after_s:g} s.",
            hint="Inspect the connector. If its work takes longer, raise patience_s of `connect`.",
        )
        self._call.cancel()

    def end(self) -> None:
        """Half-close the stream: no more requests follow."""
        with self._changed:
            self._progress += 1
            self._half_closed = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Cancel the stream. The connector rolls back its open transaction."""
        self._call.cancel()

    @property
    def over(self) -> bool:
        """True once the call has ended, by either side."""
        return self._over

    @property
    def idle(self) -> bool:
        """True if no transaction is in progress."""
        return self._transaction.idle

    @property
    def acknowledged(self) -> bool:
        """True if the connector has acknowledged the last commit. A Flush may then follow."""
        return self._transaction.response in (Kind.ACKNOWLEDGED, Kind.LOADED)

    def _requests(self) -> Iterator[bytes]:
        """Yield the encoded requests to gRPC, which iterates in a separate thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._buffer or self._half_closed or self._over)
                if self._over or not self._buffer:
                    return
                data = self._buffer.popleft()
                self._progress += 1
                self._buffered_bytes -= len(data)
                self._changed.notify_all()
            yield data

    def _is_over(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._ended.set()

    def _details(self, error: Any) -> str:
        return redact(error.details() or "", self._config, self._marked)

    def _cause(self) -> Exception:
        if self._overdue is not None:
            return self._overdue
        if isinstance(self._call, grpc.RpcError) and self._call.code() is not grpc.StatusCode.OK:
            details = self._details(self._call)
            return _translated(self._call, self._address, "Transactions", details)
        return ConnectorFailed(f"connector at {self._address} ended the stream")


def _channel(address: str, security: Security) -> grpc.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", UNLIMITED),
        ("grpc.max_receive_message_length", UNLIMITED),
        # Each connection has its own sockets: one connection must not fail with another.
        ("grpc.use_local_subchannel_pool", 1),
        # Detect a connector that vanished without closing the connection.
        (
            "grpc.keepalive_time_ms",
            KEEPALIVE_MS if security.server_name == SERVER_NAME else KEEPALIVE_OTHERS_MS,
        ),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Local traffic must not pass through a proxy on another machine.
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


def _hangs(address: str, awaited: str, after_s: float) -> ConnectorUnreachable:
    return ConnectorUnreachable(
        f"connector at {address} does not answer",
        detail=f"In {after_s:g} s, {awaited}, and no second connection could be established.",
        hint="Check its process, its host and the network.",
    )


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
    grpc.StatusCode.DATA_LOSS,
)


_SETUP: Final = ("Spec", "Validate", "ApplyUpsert", "Apply")
"""Calls whose errors are rejections, unless the status is transient.

A connector without status codes returns UNKNOWN for a table that it cannot materialize.
"""

_TRANSIENT: Final = (
    *_UNREACHABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def _config(request: Spec | Validate | Apply | Open) -> Mapping[str, Any]:
    """Return the endpoint and resource configs of a request."""
    spec = request.materialization if isinstance(request, Apply | Open) else request
    bindings = () if isinstance(spec, Spec) else spec.bindings
    texts = [spec.endpoint_spec_json, *(binding.resource_spec_json for binding in bindings)]
    configs = []
    for text in texts:
        with suppress(ValueError):  # A test of a connector may send text that is not JSON.
            configs.append(json.loads(text))
    return {"configs": configs}


def _cause(error: grpc.RpcError, details: str) -> grpc.RpcError | None:
    """Return `error` as the cause of another one; None if its details contain a secret.

    A traceback prints the cause.
    """
    return error if (error.details() or "") == details else None


def _translated(error: Any, address: str, method: str, details: str) -> ConnectorError:
    """Return the error of a call, with redacted `details` instead of its own."""
    code = error.code()
    if code in _UNREACHABLE:
        return ConnectorUnreachable(
            f"no answer from the connector at {address}",
            detail=f"{method}: {details}.",
            hint="Check that the connector is running and listens on this address. If it uses TLS, "
            "configure certificates.",
        )
    rejected = code in _REFUSED or (method in _SETUP and code not in _TRANSIENT)
    kind = ConnectorRefused if rejected else ConnectorFailed
    message, _, remainder = details.partition("\n")
    detail, marked, hint = f"\n{remainder}".rpartition("\nhint: ")
    translated = kind(
        message or f"{method} failed",
        detail=detail.removeprefix("\n") if marked else remainder,
        hint=hint if marked else "",
    )
    translated.add_note(f"connector: {address}, {method}, {code.name}")
    return translated


def _unimplemented(error: ConnectorError) -> bool:
    cause = error.__cause__ or error.__context__
    return isinstance(cause, grpc.RpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
