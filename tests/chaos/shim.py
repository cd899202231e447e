"""Proxy between runtime and connector that forwards messages and injects a fault.

    runtime ◄──► shim ◄──► connector (host 0, host 1)

Messages are forwarded as bytes. In a Transactions stream the shim decodes them, counts the
messages of each kind, and injects its `Fault` at the nth of one kind, once it is armed:

    crash connector   kill -9, before a request or a response is delivered
    crash runtime     kill -9 of the driver, at the same points
    crash executor    kill -9 of every process that runs tasks, if separate
    cut               close the stream; both ends stay alive
    stall             forward nothing until `resume` is set
    replay            after Acknowledged: a new stream with the same state acknowledges
                      again, `times` times; then the stream is cut
    zombie            the connector's end stays open with the messages sent so far, the
                      runtime's end is cut, and new streams use another host; later, the
                      old stream resumes

The shim records commits, acknowledgements and whether the fault has fired. A run without a
fired fault proves nothing.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, Literal

import grpc

from penstock.materialize.checkpoint import Checkpoint, decode
from penstock.protocol.connector_state import combine_state
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import (
    Acknowledge,
    Acknowledged,
    Kind,
    Open,
    Opened,
    StartCommit,
    StartedCommit,
    StateUpdate,
)
from penstock.protocol.wire import METHODS, decode_request, decode_response, encode_request
from tests.chaos.actors import Connectors, until

Action = Literal[
    "crash connector", "crash runtime", "crash executor", "cut", "stall", "replay", "zombie"
]

UNLIMITED: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
AWAITS: Final = (Kind.OPEN, Kind.FLUSH, Kind.START_COMMIT, Kind.ACKNOWLEDGE)
"""Requests after which a runtime waits for a response."""

BEHIND_MS: Final = 10_000
CUT: Final = (grpc.StatusCode.UNAVAILABLE, "the stream was cut")


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault and the message that triggers it."""

    action: Action
    at: Kind
    nth: int = 1
    after_commits: int = 2
    """Number of StartedCommits, of all shards, that arm the fault."""

    shard: int | None = None
    """Index of the shard whose messages count, in order of key ranges; None: all."""

    times: int = 1
    behind: bool = False
    """True to wait until another shard has committed the same checkpoint."""

    def __str__(self) -> str:
        which = "" if self.shard is None else f" of shard {self.shard}"
        times = f" {self.times} times" if self.times > 1 else ""
        where = f"at {self.at} {self.nth}{which}"
        return f"{self.action}{times} {where}, after {self.after_commits} commits"


@dataclass(frozen=True, slots=True)
class Committed:
    """Checkpoint that a connector has committed or prepared."""

    key_range: KeyRange
    checkpoint: Checkpoint
    zombie: bool


@dataclass
class Shim:
    """Proxy server of one materialization."""

    address: str
    connectors: Connectors
    fault: Fault | None = None
    on_fired: Callable[[], None] = lambda: None
    """Called when the fault fires, before it is injected."""

    kill_runtime: Callable[[], None] = lambda: None
    kill_executors: Callable[[], None] = lambda: None
    watch: Callable[[Kind, KeyRange], None] = lambda _kind, _range: None
    """Called before each message of a stream is forwarded."""

    spread: bool = False
    """True to alternate streams between two hosts."""

    fired: int = 0
    streams: int = 0
    messages: int = 0
    acknowledged: int = 0
    commits: list[Committed] = field(default_factory=list)
    planned: list[Committed] = field(default_factory=list)
    zombie_responses: list[str] = field(default_factory=list)
    resume: threading.Event = field(default_factory=threading.Event)
    """Ends a stall, and resumes a zombie."""

    zombie_done: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.host = 0
        self._counts = 0
        self._channels: dict[str, grpc.Channel] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(64, thread_name_prefix="shim"),
            handlers=[_Handlers(self)],
            options=UNLIMITED[:2],
        )
        self._server.add_insecure_port(self.address)
        self._server.start()

    def close(self) -> None:
        self.resume.set()
        self._server.stop(0).wait()
        for channel in self._channels.values():
            channel.close()

    # Forwarding.

    def channel(self, host: int) -> grpc.Channel:
        address = self.connectors.address(host)
        with self.lock:
            if address not in self._channels:
                self._channels[address] = grpc.insecure_channel(address, options=UNLIMITED)
            return self._channels[address]

    def call_method(self, method: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            answer: bytes = self.channel(self.host).unary_unary(method)(data, timeout=60)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
            raise  # Unreachable: `abort` raises.
        return answer

    def transactions(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        with self.lock:
            self.streams += 1
            host = self.streams % 2 if self.spread else self.host
        return _StreamProxy(self, context, host).run(requests)

    # Observations.

    def due_fault(self, line: "_StreamProxy", kind: Kind) -> Fault | None:
        """Return the fault if this message triggers it."""
        with self.lock:
            fault = self.fault
            if fault is None or self.fired or kind is not fault.at or line.zombie:
                return None
            if len(self.commits) < fault.after_commits:
                return None
            if fault.shard is not None and fault.shard != line.shard:
                return None
            self._counts += 1
            if self._counts < fault.nth:
                return None
            self.fired = 1
        self.on_fired()
        return fault

    def observe(self, line: "_StreamProxy", kind: Kind) -> None:
        if line.key_range is None:
            return
        self.messages += 1
        try:
            self.watch(kind, line.key_range)
        except BaseException as error:  # noqa: BLE001 - reported as a violation
            self.errors.append(error)


class _StreamProxy:
    """One stream in both directions."""

    def __init__(self, shim: Shim, context: grpc.ServicerContext, host: int) -> None:
        self.shim = shim
        self.host = host
        self.key_range: KeyRange | None = None
        self.shard = 0
        self.zombie = False
        self._context = context
        self._opening: Open | None = None
        self._state = StateUpdate(b"{}")
        self._last: Committed | None = None
        self._held: list[bytes] | None = None
        self._up: SimpleQueue[bytes | None] = SimpleQueue()
        self._down: SimpleQueue[Any] = SimpleQueue()
        self._cut = False

    def run(self, requests: Iterator[bytes]) -> Iterator[bytes]:
        method = self.shim.channel(self.host).stream_stream(METHODS + "Transactions")
        self._call = method(iter(self._up.get, None))
        self._context.add_callback(self._runtime_disconnected)
        for pump in (lambda: self._forward_requests(requests), self._forward_responses):
            threading.Thread(target=pump, name="shim stream", daemon=True).start()
        while (data := self._down.get()) is not None:
            if not isinstance(data, bytes):
                self._context.abort(*data)
            yield data

    def _runtime_disconnected(self) -> None:
        """Cancel the call when the runtime disconnects."""
        if not self.zombie:
            self._call.cancel()
        self._down.put(None)

    def cut(self) -> None:
        self._cut = True
        if not self.zombie:
            self._call.cancel()
        self._down.put(CUT)

    # From the runtime.

    def _forward_requests(self, requests: Iterator[bytes]) -> None:
        try:
            for data in requests:
                if not self._pass_on(data):
                    return
        except Exception:  # noqa: BLE001 - gRPC raises several exceptions when a stream is cut
            return
        self._up.put(None)

    def _pass_on(self, data: bytes) -> bool:
        request = decode_request(data)
        if isinstance(request, Open):
            self.key_range, self._opening = request.key_range, request
            self.shard = round(request.key_range.begin / request.key_range.width)
            self._state = StateUpdate(request.state_json or b"{}")
        if isinstance(request, StartCommit):
            checkpoint = decode(request.checkpoint, connector="shim")
            assert checkpoint is not None
            assert self.key_range is not None
            self._last = Committed(self.key_range, checkpoint, self.zombie)
            self.shim.planned.append(self._last)
        if self._held is not None:
            return self._hold(request.kind, data)
        self.shim.observe(self, request.kind)
        fault = self.shim.due_fault(self, request.kind)
        if fault is not None:
            if fault.action == "zombie":
                self.zombie, self._held = True, []
                self.shim.host = 1
                return self._hold(request.kind, data)
            if not self._inject(fault):
                return False
        self._up.put(data)
        return True

    def _hold(self, kind: Kind, data: bytes) -> bool:
        """Buffer the requests of a zombie, then cut the runtime off at a request that awaits."""
        assert self._held is not None
        self._held.append(data)
        if kind not in AWAITS:
            return True
        self.cut()
        threading.Thread(target=self._resume_zombie, name="zombie", daemon=True).start()
        return False

    def _resume_zombie(self) -> None:
        assert self._held is not None
        self.shim.resume.wait()
        for data in self._held:
            self._up.put(data)

    # From the connector.

    def _forward_responses(self) -> None:
        try:
            for data in self._call:
                response = decode_response(data)
                if self.zombie:
                    self.shim.zombie_responses.append(str(response.kind))
                    if self.shim.resume.is_set():
                        return
                    continue
                if isinstance(response, StartedCommit):
                    assert self._last is not None
                    with self.shim.lock:
                        self.shim.commits.append(self._last)
                    if response.state is not None:
                        self._state = combine_state(self._state, response.state)
                self.shim.observe(self, response.kind)
                fault = self.shim.due_fault(self, response.kind)
                if fault is not None and not self._inject(fault):
                    return
                self._down.put(data)
                self.shim.acknowledged += response.kind is Kind.ACKNOWLEDGED
            self._down.put(None)
        except grpc.RpcError as error:
            if self.zombie:
                self.shim.zombie_responses.append(error.code().name)
            elif not self._cut:
                self._down.put((error.code(), error.details()))
        finally:
            if self.zombie:
                self._call.cancel()
                self.shim.zombie_done.set()

    # Faults.

    def _inject(self, fault: Fault) -> bool:
        """Inject the fault; return whether to forward the message afterwards."""
        if fault.behind:
            until(self._other_committed, patience_ms=BEHIND_MS)
        match fault.action:
            case "crash connector":
                self.shim.connectors.kill(self.host)
                self.cut()
            case "crash runtime":
                self.shim.kill_runtime()
                self.cut()
            case "crash executor":
                self.shim.kill_executors()
                self.cut()
            case "cut":
                self.cut()
            case "stall":
                self.shim.resume.wait()
                return True
            case "replay":
                for _ in range(fault.times):
                    self._acknowledge_again()
                self.cut()
            case "zombie":
                raise AssertionError("a zombie is made elsewhere")
        return False

    def _other_committed(self) -> bool:
        mine = self._last
        return mine is not None and any(
            each.checkpoint == mine.checkpoint and each.key_range != mine.key_range
            for each in self.shim.commits
        )

    def _acknowledge_again(self) -> None:
        """Acknowledge again in a new stream, as a runtime does after a lost response."""
        assert self._opening is not None
        opening = self._opening
        again = Open(
            opening.materialization, opening.version, opening.key_range, self._state.json or b"{}"
        )
        method = self.shim.channel(self.host).stream_stream(METHODS + "Transactions")
        requests: SimpleQueue[bytes | None] = SimpleQueue()
        answers = method(iter(requests.get, None))
        for request, kind in ((again, Opened), (Acknowledge(), Acknowledged)):
            requests.put(encode_request(request))
            assert isinstance(decode_response(next(answers)), kind)
        requests.put(None)
        list(answers)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, shim: Shim) -> None:
        self._shim = shim

    def service(self, called: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = called.method
        if method == METHODS + "Transactions":
            return grpc.stream_stream_rpc_method_handler(self._shim.transactions)
        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: self._shim.call_method(method, data, context)
        )
