"""A connector as a gRPC server.

    with serve(Connector(), "unix:/run/mine.sock") as server:
        server.wait()

Each call is told what went wrong by its status (`grpc_status.py`). Of the streams that are
open, a newer one ends the older ones that write some of the same keys.
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
from penstock.sdk.connector import Applying, Asked, Connector, Opening, Validating
from penstock.sdk.errors import BrokenOff, ContractBroken
from penstock.sdk.grpc_status import Told, secrets
from penstock.sdk.stream import Stream, superseded
from penstock.sdk.transactor import Transactor

__all__ = ["Server", "serve"]

UNLIMITED: Final = -1
MESSAGE_BYTES: Final = 256 << 20
"""The largest message that is received: a row and its key are in one message."""

CALLS: Final = 256
"""So many calls may be under way at once, each in a thread; more are refused at once."""

SILENT_STREAMS: Final = 64
"""So many streams of one peer may wait to send Open; each takes a thread."""

END_OLDER_S: Final = 20.0
"""So long an older stream may take to let go, once it was broken off."""

STOP_S: Final = 10.0

_T = TypeVar("_T")


def serve(
    connector: Connector[Any, Any], address: str, security: Security | None = None
) -> "Server":
    """Serve `connector` at `address`: `host:port` (port 0: any that is free) or `unix:PATH`.

    Raises:
        UsageError: the address cannot be listened on, or not in private.
    """
    return Server(connector, address, security or Security())


class Server:
    """A connector that is being served."""

    def __init__(self, connector: Connector[Any, Any], address: str, security: Security) -> None:
        security.check(address)
        if security.tls and security.certificate is None:
            raise UsageError(
                f'connector "{connector.name}" cannot serve TLS without a certificate of its own',
                hint="Give a certificate and its key.",
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
                # A runtime that vanished without a word is noticed, and rolled back.
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
        """Until `stop` is set, or for ever."""
        (stop or threading.Event()).wait()

    def stop(self) -> None:
        """Break off what is under way, roll it back, and let go of the address."""
        self._streams.break_off_all(BrokenOff("the connector was stopped"))
        self._server.stop(STOP_S).wait()

    def _listen(self, address: str, security: Security) -> str:
        if address.startswith("unix:"):
            _check_free(address.removeprefix("unix:"))
        # A socket is for whoever serves it, and nobody else on the machine.
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
                detail="The address is taken, or is not one of this machine.",
            ) from error
        finally:
            os.umask(before)
        if address.startswith(("unix:", "unix-abstract:")):
            return address
        return f"{address.rpartition(':')[0]}:{port}"

    # The five methods.

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        def unary(answer: Callable[[Any], Any], kind: type) -> grpc.RpcMethodHandler:
            def handle(data: bytes, context: grpc.ServicerContext) -> bytes:
                told = Told(self._connector.name, context)
                with told:
                    request: Any = decode(kind, data)
                    told.secrets = self._secrets(request)
                    return encode(answer(request))
                raise AssertionError  # `Told` ends the call.

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
        asked = Validating(
            request.materialization,
            parse(connector.endpoint, request.endpoint_spec_json, "endpoint"),
            [
                Asked(
                    parse(connector.resource, each.resource_spec_json, f"resource {index}"),
                    each.collection,
                    projected(each.collection, each.field_config_json),
                    each.replaces,
                )
                for index, each in enumerate(request.bindings)
            ],
        )
        found = connector.validate(asked)
        if len(found) != len(request.bindings):
            raise ContractBroken(
                f"validate answered {len(found)} bindings of {len(request.bindings)}"
            )
        validated = Validated(tuple(found))
        for each in validated.bindings:
            if not isinstance(each, ValidatedBinding):
                raise ContractBroken(f"validate answered a {type(each).__name__}")
        if violation := find_violation(validated):
            raise ContractBroken(f"what validate answered {violation}")
        return validated

    def _apply(self, request: Apply) -> Applied:
        return Applied(self._connector.apply(self._applying(request)))

    def _delete(self, request: Apply) -> Applied:
        return Applied(self._connector.delete(self._applying(request)))

    def _applying(self, request: Apply) -> Applying[Any, Any]:
        spec = request.materialization
        endpoint, bindings = self._understood(spec)
        return Applying(
            spec.materialization,
            request.version,
            endpoint,
            bindings,
            request.dry_run,
            spec,
            frozenset(request.recreates),
        )

    def _understood(self, spec: MaterializationSpec) -> tuple[Any, list[Binding[Any]]]:
        if violation := find_spec_violation(spec):
            raise RemoteProtocolError(f'materialization "{spec.materialization}": {violation}')
        connector = self._connector
        endpoint = parse(connector.endpoint, spec.endpoint_spec_json, "endpoint")
        return endpoint, [
            bind(index, each, parse(connector.resource, each.resource_spec_json, str(index)))
            for index, each in enumerate(spec.bindings)
        ]

    def _transactions(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        told = Told(self._connector.name, context)
        peer = _host_of(context.peer())

        def opener(opening: Open, stream: Stream) -> tuple[Transactor, list[Binding[Any]]]:
            spec = opening.materialization
            told.secrets = self._secrets(opening)
            endpoint, bindings = self._understood(spec)
            self._streams.take_over(spec.materialization, opening, stream)
            stream.must_go_on()
            transactor = self._connector.open(
                Opening(
                    spec.materialization,
                    opening.version,
                    endpoint,
                    bindings,
                    opening.key_range,
                    _state(opening),
                    stream.broken_off,
                )
            )
            if not isinstance(transactor, Transactor):
                raise ContractBroken(f"open returned a {type(transactor).__name__}")
            return transactor, bindings

        # Not forgotten when the call ends, but when the transactor is closed: a newer stream
        # must not be opened beside one that is still at work.
        stream = Stream(self._connector.name, opener, self._streams.remove)
        if not self._streams.add(stream, peer):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f'connector "{self._connector.name}" has {SILENT_STREAMS} streams of this peer '
                "that have not sent Open",
            )
        if not context.add_callback(lambda: stream.break_off(BrokenOff("the call was ended"))):
            self._streams.remove(stream)
            return
        yield from stream.run(requests)
        if stream.error is not None:
            with told:
                raise stream.error

    # Who asks, and what they must not see.

    def _rejection(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return what ends a call without the token, before any of its messages is read."""
        if not self._token:
            return None
        shown = dict(call.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(str(shown).encode(), f"Bearer {self._token}".encode()):
            return None
        given = "and not this one" if shown else "and none was given"
        text = (
            f'connector "{self._connector.name}" wants a bearer token, {given}\n'
            "On the command line it is given by --token-file."
        )

        def reject(_requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
            yield b""

        # SUBTLE: a stream, for unary calls too. gRPC reads the message of a unary call first.
        return grpc.stream_stream_rpc_method_handler(reject)

    def _secrets(self, request: Any) -> Sequence[str]:
        spec = request if isinstance(request, Validate) else None
        spec = spec or getattr(request, "materialization", None)
        if spec is None:
            return ()
        configured = [(self._connector.endpoint, spec.endpoint_spec_json)]
        configured += [
            (self._connector.resource, each.resource_spec_json) for each in spec.bindings
        ]
        understood: list[BaseModel] = []
        for model, text in configured:
            with suppress(PenstockError):
                understood.append(parse(model, text, "anything"))
        return secrets(understood)


def _check_free(path: str) -> None:
    """Nobody must be listening on a socket: gRPC would take it away from them."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise UsageError(
            f'folder "{folder}" of socket "unix:{path}" does not exist',
            hint=f"Make it: mkdir -p {folder}",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise UsageError(
        f'"unix:{path}" is taken: somebody listens on it', hint="Name another path, or end them."
    )


def _host_of(peer: str) -> str:
    """Return a peer without its port: `ipv4:10.0.0.7` of `ipv4:10.0.0.7:51000`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class _Streams:
    """The streams that are open, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[Stream, str]] = []
        self._peers: dict[Stream, str] = {}
        """Peers of the streams that have not sent Open."""

    def add(self, stream: Stream, peer: str) -> bool:
        """Add a stream, unless too many of its peer wait for Open."""
        with self._lock:
            if sum(each == peer for each in self._peers.values()) >= SILENT_STREAMS:
                return False
            self._peers[stream] = peer
            self._open.append((stream, ""))
            return True

    def remove(self, stream: Stream) -> None:
        with self._lock:
            self._peers.pop(stream, None)
            self._open = [each for each in self._open if each[0] is not stream]

    def take_over(self, materialization: str, opening: Open, stream: Stream) -> None:
        """End every older stream that writes some of the same keys, and wait until it has."""
        key_range = opening.key_range
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
                (each, materialization if each is stream else name) for each, name in self._open
            ]
        for other in older:
            other.break_off(superseded(materialization, key_range))
        for other in older:
            if not other.finished.wait(END_OLDER_S):
                raise PenstockError(
                    f'an older stream of materialization "{materialization}" does not end',
                    detail=f"It was told to, {END_OLDER_S:.0f} seconds ago.",
                    hint="Try again; if it stays so, restart the connector.",
                )

    def break_off_all(self, why: Exception) -> None:
        with self._lock:
            streams = [stream for stream, _ in self._open]
        for stream in streams:
            stream.break_off(why)
        for stream in streams:
            stream.finished.wait(STOP_S)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds a method by its path."""

    def __init__(
        self,
        methods: dict[str, grpc.RpcMethodHandler],
        rejection: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
    ) -> None:
        self._rejection = rejection
        self._methods = {f"/materialize.Driver/{name}": each for name, each in methods.items()}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        method = self._methods.get(handler_call_details.method)
        return method and (self._rejection(handler_call_details) or method)


def _state(opening: Open) -> dict[str, Any]:
    found = json.loads(opening.state_json) if opening.state_json else {}
    return found if isinstance(found, dict) else {}
