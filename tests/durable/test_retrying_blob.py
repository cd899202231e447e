import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.durable.eager_clock import EagerClock
from tests.fix_objects import ObjectServer

from penstock.clock import SYSTEM_CLOCK
from penstock.deadlines import stop_timeout_s
from penstock.durable.blob import Blob
from penstock.durable.location import open_blob
from penstock.durable.memory import MemoryBlob, Shelf
from penstock.durable.retrying_blob import RetryingBlob
from penstock.errors import (
    DeterminateError,
    DurabilityLost,
    IndeterminateError,
    StoreError,
    StoreRefused,
    UsageError,
)
from penstock.testing.stores import Fate, UnreliableBlob

fates = st.lists(st.sampled_from(Fate), max_size=8)


def retrying(
    inner: Blob, clock: EagerClock | None = None, patience_ms: int | None = None
) -> RetryingBlob:
    return RetryingBlob(inner, clock or EagerClock(), random.Random(1), patience_ms)


@pytest.mark.parametrize("fate", Fate)
def test_retrying_create_of_free_key_returns_true_after_any_fault(fate: Fate) -> None:
    shelf = Shelf()
    blob = retrying(UnreliableBlob(MemoryBlob(shelf), script=[fate]))
    assert blob.create("log/0", b"ours")
    assert MemoryBlob(shelf).get("log/0") == b"ours"


@pytest.mark.parametrize("fate", Fate)
def test_retrying_create_of_taken_key_returns_false_after_any_fault(fate: Fate) -> None:
    shelf = Shelf()
    MemoryBlob(shelf).put("log/0", b"theirs")
    blob = retrying(UnreliableBlob(MemoryBlob(shelf), script=[fate]))
    assert not blob.create("log/0", b"ours")
    assert MemoryBlob(shelf).get("log/0") == b"theirs"


@settings(deadline=None)  # Slow on two shared cores.
@given(scripts=st.lists(fates, min_size=2, max_size=4))
def test_retrying_create_by_many_creators_with_faults_has_one_winner(
    scripts: list[list[Fate]],
) -> None:
    shelf = Shelf()
    told = [
        retrying(UnreliableBlob(MemoryBlob(shelf), script=script)).create("log/0", b"%d" % number)
        for number, script in enumerate(scripts)
    ]
    assert told.count(True) == 1
    assert MemoryBlob(shelf).get("log/0") == b"%d" % told.index(True)


@settings(deadline=None)  # Slow on two shared cores.
@given(script=fates)
def test_retrying_put_and_delete_take_effect_after_any_faults(script: list[Fate]) -> None:
    shelf = Shelf()
    blob = retrying(UnreliableBlob(MemoryBlob(shelf), script=script))
    blob.put("k", b"v")
    assert MemoryBlob(shelf).get("k") == b"v"
    blob.delete("k")
    assert MemoryBlob(shelf).get("k") is None


class RivalBlob(UnreliableBlob):
    """Store that loses a request. A rival creates the key before the retry."""

    def create(self, key: str, data: bytes) -> bool:
        try:
            return super().create(key, data)
        except IndeterminateError:
            self._inner.create(key, b"the rival's")
            raise


def test_retrying_create_loses_to_rival_after_lost_request() -> None:
    blob = retrying(RivalBlob(MemoryBlob(), script=[Fate.REQUEST_LOST]))
    assert not blob.create("log/0", b"ours")


class ForgetfulBlob(UnreliableBlob):
    """Store that deletes a key as soon as a create finds it taken."""

    def create(self, key: str, data: bytes) -> bool:
        created = super().create(key, data)
        if not created:
            self._inner.delete(key)
        return created


def test_retrying_create_of_key_deleted_after_lost_answer_raises_indeterminate_error() -> None:
    blob = retrying(ForgetfulBlob(MemoryBlob(), script=[Fate.ANSWER_LOST]))
    with pytest.raises(IndeterminateError, match="is unknown"):
        blob.create("log/0", b"ours")


class FailingBlob(MemoryBlob):
    """Store that raises one of the given errors per call, and then works."""

    def __init__(
        self, errors: list[StoreError], on_call: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="memory:failing")
        self._errors = errors
        self._on_call = on_call

    def _open(self) -> None:
        self._on_call()
        super()._open()
        if self._errors:
            raise self._errors.pop(0)


@pytest.mark.parametrize("error", [StoreRefused("no"), DurabilityLost("no")])
def test_retrying_blob_raises_permanent_error_without_retry(error: StoreError) -> None:
    clock = EagerClock()
    blob = retrying(FailingBlob([error]), clock)
    with pytest.raises(type(error)):
        blob.get("k")
    assert clock.waits_ms == []


def test_retrying_create_refused_after_lost_answer_raises_indeterminate_error() -> None:
    shelf = Shelf()
    lossy = UnreliableBlob(MemoryBlob(shelf), script=[Fate.ANSWER_LOST])

    class ThenRefused(UnreliableBlob):
        def create(self, key: str, data: bytes) -> bool:
            if self.fates:
                raise StoreRefused("credentials were withdrawn", hint="Ask for them.")
            self.fates.append(Fate.ANSWER_LOST)
            return lossy.create(key, data)

    with pytest.raises(IndeterminateError) as told:
        retrying(ThenRefused(MemoryBlob(shelf))).create("log/0", b"ours")
    assert told.value.hint == "Ask for them."
    assert MemoryBlob(shelf).get("log/0") == b"ours"


def test_retrying_put_backs_off_and_writes_same_bytes() -> None:
    clock = EagerClock()
    blob = retrying(FailingBlob([DeterminateError("not now")] * 12), clock)
    blob.put("k", b"same")
    assert blob.get("k") == b"same"
    assert len(clock.waits_ms) == 12
    assert clock.waits_ms[0] <= 20
    assert 2_500 <= clock.waits_ms[-1] <= 5_000


def test_retrying_blob_reports_failing_operation_in_statistics_and_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "penstock.durable")
    clock = EagerClock()
    seen = []
    blob = retrying(
        FailingBlob(
            [DeterminateError("not now")] * 20, on_call=lambda: seen.append(blob.statistics())
        ),
        clock,
    )
    began_ms = clock.now_ms()
    assert blob.get("log/7") is None
    assert seen[0].failing == ()
    assert [failing.attempts for each in seen for failing in each.failing] == list(range(1, 21))
    failing = seen[-1].failing[0]
    assert (failing.operation, failing.key) == ("get", "log/7")
    assert (failing.since_ms, failing.error) == (began_ms, "not now")
    after = blob.statistics()
    assert after.failing == ()
    assert (after.operations, after.retries) == (1, 20)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    elapsed_ms = clock.now_ms() - began_ms
    assert {record.message for record in warnings} == {"store operation failed; retrying"}
    assert 2 <= len(warnings) <= 1 + elapsed_ms // 30_000
    assert vars(warnings[0])["fields"] == {
        "operation": "get",
        "key": "log/7",
        "store": "memory:failing",
        "error": "DeterminateError",
        "since": datetime.fromtimestamp(began_ms / 1_000, UTC).isoformat(timespec="milliseconds"),
        "attempts": 1,
    }
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
        "store operation recovered"
    ]


def test_retrying_blob_statistics_count_operations_and_bytes() -> None:
    blob = retrying(MemoryBlob())
    blob.put("a", b"four")
    assert blob.create("b", b"sixsix")
    assert not blob.create("b", b"again")
    assert blob.get("a") == b"four"
    blob.list("")
    statistics = blob.statistics()
    assert (statistics.operations, statistics.retries) == (5, 0)
    assert (statistics.bytes_written, statistics.bytes_read) == (10, 4)


@pytest.mark.parametrize(
    ("fate", "kind"),
    [(Fate.FAILED, DeterminateError), (Fate.REQUEST_LOST, IndeterminateError)],
)
def test_retrying_create_beyond_patience_raises_error_of_its_attempts(
    fate: Fate, kind: type[StoreError]
) -> None:
    clock = EagerClock()
    began_ms = clock.boot_ms()
    blob = retrying(UnreliableBlob(MemoryBlob(), script=[fate] * 1_000), clock, patience_ms=10_000)
    with pytest.raises(kind):
        blob.create("log/0", b"ours")
    assert clock.boot_ms() - began_ms == 10_000


def test_retrying_create_with_one_indeterminate_attempt_raises_indeterminate_error() -> None:
    script = [Fate.FAILED, Fate.REQUEST_LOST, *[Fate.FAILED] * 1_000]
    blob = retrying(UnreliableBlob(MemoryBlob(), script=script), patience_ms=10_000)
    with pytest.raises(IndeterminateError):
        blob.create("log/0", b"ours")


def test_retrying_blob_close_ends_waiting_operation_with_its_last_error() -> None:
    failing = threading.Event()

    class Unreachable(MemoryBlob):
        def put(self, key: str, data: bytes) -> None:
            failing.set()
            raise DeterminateError("not now")

    blob = RetryingBlob(Unreachable(), SYSTEM_CLOCK, random.Random(1))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(blob.put, "k", b"")
        assert failing.wait(10)
        assert blob.close()
        with pytest.raises(DeterminateError, match="not now"):
            waiting.result(10)
    with pytest.raises(UsageError):
        blob.get("k")


def test_retrying_create_continues_after_object_server_is_killed_and_restarted(
    object_server: ObjectServer, object_url: str
) -> None:
    blob = RetryingBlob(open_blob(object_url, writing=True), SYSTEM_CLOCK, random.Random(1))
    enough = threading.Event()

    def run() -> list[int]:
        created = []
        for number in range(40):
            if blob.create(f"log/{number:03}", b"entry %d" % number):
                created.append(number)
            if number == 10:
                enough.set()
        return created

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(run)
        assert enough.wait(60)
        object_server.kill()
        try:
            while not blob.statistics().failing and not writing.done():
                wait([writing], timeout=0.01)
        finally:
            object_server.start()
        assert writing.result(60) == list(range(40))
    assert blob.statistics().retries > 0
    reader = open_blob(object_url)
    assert [listed.key for listed in reader.list("log/")] == [f"log/{n:03}" for n in range(40)]
    assert all(reader.get(f"log/{n:03}") == b"entry %d" % n for n in range(40))
    blob.close()
    reader.close()


def test_retrying_create_that_keeps_failing_after_stop_raises_within_stop_timeout() -> None:
    stop, clock = threading.Event(), EagerClock()
    inner = UnreliableBlob(MemoryBlob(), script=[Fate.REQUEST_LOST] + [Fate.FAILED] * 1_000)
    blob = RetryingBlob(inner, clock, random.Random(1), stop=stop)
    stop.set()
    with pytest.raises(IndeterminateError, match="is unknown"):
        blob.create("k", b"x")
    assert sum(clock.waits_ms) <= stop_timeout_s() * 1_000


def test_retrying_create_that_fails_once_after_stop_is_retried() -> None:
    stop = threading.Event()
    inner = UnreliableBlob(MemoryBlob(), script=[Fate.ANSWER_LOST])
    blob = RetryingBlob(inner, EagerClock(), random.Random(1), stop=stop)
    stop.set()
    assert blob.create("k", b"x")
