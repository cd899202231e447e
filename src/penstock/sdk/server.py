"""gRPC server of a connector.

    with serve(Connector(), "unix:/run/mine.sock") as server:
        server.wait()

Errors are reported in the status of the call (`grpc_status.py`). A new stream cancels older
streams of the same materialization whose key ranges overlap its own.
"""

import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import urljoin

import grpc
from pydantic import BaseModel

from penstock.errors import PenstockError, UsageError
from penstock.protocol.errors import RemoteProtocolError
from penstock.protocol.message_rules import find_spec_violation, find_violation
from penstock.protocol.messages import (
    Applied,
    Apply,
    Open,
    Spec,
    SpecResponse,
    Validate,
    Validated,
    ValidatedBinding,
)
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.transport_security import Security, read_pem
from penstock.protocol.wire import decode, encode
from penstock.sdk.bindings import Binding, bind, projected
from penstock.sdk.config import json_schema, parse
from penstock.sdk.connector import (
    ApplyRequest,
    Connector,
    OpenRequest,
    RequestedBinding,
    ValidateRequest,
)
from penstock.sdk.errors import ContractBroken, StreamCancelled
from penstock.sdk.grpc_status import CallStatus, secrets
from penstock.sdk.stream import Stream, taken_over
from penstock.sdk.transactor import Transactor

__all__ = ["Server", "serve"]

UNLIMITED: Final = -1
MESSAGE_BYTES: Final = 256 << 20
"""Largest message that is received. A row and its key are in one message."""

CALLS: Final = 256
"""Maximum number of concurrent calls, each in a thread. Further calls are rejected."""

SILENT_STREAMS: Final = 64
"""Maximum number of streams of one peer that have not sent Open. Each takes a thread."""

END_OLDER_S: Final = 20.0
"""Time limit for an older stream to end after it is cancelled."""

STOP_S: Final = 10.0

_T = TypeVar("_T")


def serve(
    connector: Connector[Any, Any], address: str, security: Security | None = None
) -> "Server":
    """Serve `connector` at `address`: `host:port` (port 0 selects a free one) or `unix:PATH`.

    Raises:
        UsageError: the server cannot listen on the address, or the address needs TLS.
    """
    return Server(connector, address, security or Security())


class Server:
    """Running server of one connector."""

    def __init__(self, connector: Connector[Any, Any], address: str, security: Security) -> None:
        security.check(address)
        if security.tls and security.certificate is None:
            raise UsageError(
                f'connector "{connector.name}" cannot serve TLS without a certificate',
                hint="Set a certificate and its key (--tls-cert and --tls-key).",
            )
        self._connector = connector
        self._token = security.token
        self._streams = _Streams()
        self._server = grpc.server(
            ThreadPoolExecutor(CALLS, thread_name_prefix="rpc"),
            maximum_concurrent_rpcs=CALLS,
            handlers=[_Handlers(self._methods(), self._rejection)],
            options=[
                ("grpc.max_send_message_length", UNLIMITED),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                # Detects a runtime whose host has failed, to roll back its transaction.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
        )
        self.address = self._listen(address, security)
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, stop: threading.Event | None = None) -> None:
        """Wait until `stop` is set, or without limit."""
        (stop or threading.Event()).wait()

    def stop(self) -> None:
        """Cancel all streams, roll back their transactions, and release the address."""
        self._streams.cancel_all(StreamCancelled(f'connector "{self._connector.name}" was stopped'))
        self._server.stop(STOP_S).wait()

    def _listen(self, address: str, security: Security) -> str:
        if address.startswith("unix:"):
            _check_free(address.removeprefix("unix:"))
        # Only the user of this process may connect to the socket.
        before = os.umask(0o177)
        try:
            if security.tls:
                pair = (read_pem(security.key) or b"", read_pem(security.certificate) or b"")
                credentials = grpc.ssl_server_credentials(
                    [pair], read_pem(security.ca), security.ca is not None
                )
                port = self._server.add_secure_port(address, credentials)
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise UsageError(
                f'connector "{self._connector.name}" cannot listen on "{address}"',
                detail="The address is in use, or this host does not have it.",
            ) from error
        finally:
            os.umask(before)
        if address.startswith(("unix:", "unix-abstract:")):
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    # The gRPC methods.

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        def unary(respond: Callable[[Any], Any], kind: type) -> grpc.RpcMethodHandler:
            def handle(data: bytes, context: grpc.ServicerContext) -> bytes:
                status = CallStatus(self._connector.name, context)
                with status:
                    request: Any = decode(kind, data)
                    status.secrets = self._secrets(request)
                    return encode(respond(request))
                raise AssertionError  # `CallStatus` ends the call.

            return grpc.unary_unary_rpc_method_handler(handle)

        return {
            "Spec": unary(self._spec, Spec),
            "Validate": unary(self._validate, Validate),
            "ApplyUpsert": unary(self._apply, Apply),
            "ApplyDelete": unary(self._delete, Apply),
            "Transactions": grpc.stream_stream_rpc_method_handler(self._transactions),
        }

    def _spec(self, _request: Spec) -> SpecResponse:
        connector = self._connector
        url = connector.documentation_url
        return SpecResponse(
            json_schema(connector.endpoint),
            json_schema(connector.resource),
            url and urljoin(f"{Path.cwd().as_uri()}/", url),
        )

    def _validate(self, request: Validate) -> Validated:
        connector = self._connector
        validate_request = ValidateRequest(
            request.materialization,
            parse(connector.endpoint, request.endpoint_spec_json, "endpoint"),
            [
                RequestedBinding(
                    parse(connector.resource, binding.resource_spec_json, f"resource {index}"),
                    binding.collection,
                    projected(binding.collection, binding.field_config_json),
                    binding.replaces,
                )
                for index, binding in enumerate(request.bindings)
            ],
        )
        bindings = connector.validate(validate_request)
        if len(bindings) != len(request.bindings):
            raise ContractBroken(
                f"validate returned {len(bindings)} bindings for {len(request.bindings)}"
            )
        validated = Validated(tuple(bindings))
        for binding in validated.bindings:
            if not isinstance(binding, ValidatedBinding):
                raise ContractBroken(
                    f"validate returned a {type(binding).__name__}, not a ValidatedBinding"
                )
        if violation := find_violation(validated):
            raise ContractBroken(f"result of validate {violation}")
        return validated

    def _apply(self, request: Apply) -> Applied:
        return Applied(self._connector.apply(self._apply_request(request)))

    def _delete(self, request: Apply) -> Applied:
        return Applied(self._connector.delete(self._apply_request(request)))

    def _apply_request(self, request: Apply) -> ApplyRequest[Any, Any]:
        spec = request.materialization
        endpoint, bindings = self._parse_spec(spec)
        return ApplyRequest(
            spec.materialization,
            request.version,
            endpoint,
            bindings,
            request.dry_run,
            spec,
            frozenset(request.recreates),
        )

    def _parse_spec(self, spec: MaterializationSpec) -> tuple[Any, list[Binding[Any]]]:
        if violation := find_spec_violation(spec):
            raise RemoteProtocolError(f'materialization "{spec.materialization}": {violation}')
        connector = self._connector
        endpoint = parse(connector.endpoint, spec.endpoint_spec_json, "endpoint")
        return endpoint, [
            bind(
                index,
                binding,
                parse(connector.resource, binding.resource_spec_json, f"resource {index}"),
            )
            for index, binding in enumerate(spec.bindings)
        ]

    def _transactions(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        status = CallStatus(self._connector.name, context)
        peer = _host_of(context.peer())

        def opener(request: Open, stream: Stream) -> tuple[Transactor, list[Binding[Any]]]:
            spec = request.materialization
            status.secrets = self._secrets(request)
            endpoint, bindings = self._parse_spec(spec)
            self._streams.take_over(spec.materialization, request, stream)
            stream.check_not_cancelled()
            transactor = self._connector.open(
                OpenRequest(
                    spec.materialization,
                    request.version,
                    endpoint,
                    bindings,
                    request.key_range,
                    _state(request),
                    stream.cancelled,
                )
            )
            if not isinstance(transactor, Transactor):
                raise ContractBroken(f"open returned a {type(transactor).__name__}")
            return transactor, bindings

        # A stream is removed when its transactor is closed, not when the call ends: a newer stream
        # must not open while an older one still writes.
        stream = Stream(self._connector.name, opener, self._streams.remove)
        if not self._streams.add(stream, peer):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f'connector "{self._connector.name}" has {SILENT_STREAMS} streams of this peer '
                "that have not sent Open",
            )
        if not context.add_callback(
            lambda: stream.cancel(StreamCancelled("call was ended by the runtime"))
        ):
            self._streams.remove(stream)
            return
        yield from stream.run(requests)
        if stream.error is not None:
            with status:
                raise stream.error

    # Authentication and redaction.

    def _rejection(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return a handler that rejects a call without the token, before reading its messages."""
        if not self._token:
            return None
        received = dict(call.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(str(received).encode(), f"Bearer {self._token}".encode()):
            return None
        problem = "is wrong" if received else "is missing"
        text = (
            f'bearer token for connector "{self._connector.name}" {problem}\n'
            "hint: Set the token with --token-file."
        )

        def reject(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
            yield b""

        # SUBTLE: a stream handler, also for unary calls: for those, gRPC reads the message first.
        return grpc.stream_stream_rpc_method_handler(reject)

    def _secrets(self, request: Any) -> Sequence[str]:
        spec = request if isinstance(request, Validate) else None
        spec = spec or getattr(request, "materialization", None)
        if spec is None:
            return ()
        configured = [(self._connector.endpoint, spec.endpoint_spec_json)]
        configured += [
            (self._connector.resource, binding.resource_spec_json) for binding in spec.bindings
        ]
        parsed: list[BaseModel] = []
        for model, text in configured:
            with suppress(PenstockError):
                parsed.append(parse(model, text, "connector"))
        return secrets(parsed)


def _check_free(path: str) -> None:
    """Reject a socket that another server listens on: gRPC would replace it."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(
            f'folder "{folder}" of socket "unix:{path}" does not exist',
            hint=f"Create the folder: mkdir -p {folder}",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise UsageError(
        f'socket "unix:{path}" is in use', hint="Use another path, or stop the other server."
    )


def _host_of(peer: str) -> str:
    """Return a peer without its port: `ipv4:10.0.0.7` for `ipv4:10.0.0.7:51000`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class _Streams:
    """Open streams, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[Stream, str]] = []
        self._peers: dict[Stream, str] = {}
        """Peers of the streams that have not sent Open."""

    def add(self, stream: Stream, peer: str) -> bool:
        """Add a stream; return False if too many streams of its peer have not sent Open."""
        with self._lock:
            if sum(other == peer for other in self._peers.values()) >= SILENT_STREAMS:
                return False
            self._peers[stream] = peer
            self._open.append((stream, ""))
            return True

    def remove(self, stream: Stream) -> None:
        with self._lock:
            self._peers.pop(stream, None)
            self._open = [entry for entry in self._open if entry[0] is not stream]

    def take_over(self, materialization: str, request: Open, stream: Stream) -> None:
        """Cancel older streams with an overlapping key range, and wait until they end."""
        key_range = request.key_range
        with self._lock:
            self._peers.pop(stream, None)
            older = [
                other
                for other, name in self._open
                if name == materialization
                and other.key_range is not None
                and other.key_range.overlaps(key_range)
            ]
            stream.key_range = key_range
            self._open = [
                (other, materialization if other is stream else name) for other, name in self._open
            ]
        for other in older:
            other.cancel(taken_over(materialization, key_range))
        for other in older:
            if not other.finished.wait(END_OLDER_S):
                raise PenstockError(
                    f'older stream of materialization "{materialization}" does not end',
                    detail=f"The stream was cancelled {END_OLDER_S:.0f} seconds ago.",
                    hint="Try again. If the error persists, restart the connector.",
                )

    def cancel_all(self, reason: Exception) -> None:
        with self._lock:
            streams = [stream for stream, _ in self._open]
        for stream in streams:
            stream.cancel(reason)
        for stream in streams:
            stream.finished.wait(STOP_S)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handlers of the gRPC methods, by path."""

    def __init__(
        self,
        methods: dict[str, grpc.RpcMethodHandler],
        rejection: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
    ) -> None:
        self._rejection = rejection
        self._methods = {f"/materialize.Driver/{name}": method for name, method in methods.items()}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(handler_call_details.method)
        return method and (self._rejection(handler_call_details) or method)


def _state(request: Open) -> dict[str, Any]:
    state = json.loads(request.state_json) if request.state_json else {}
    return state if isinstance(state, dict) else {}
