"""Outage and recovery of a real object store.

Calls wait. Statistics name the failing operation, its object and the start of the
failure. After the recovery every operation is acknowledged once.
"""

import threading
from collections.abc import Callable

from penstock import persist
from penstock.clock import SYSTEM_CLOCK
from penstock.persist import Appended, Settings
from tests.faults.history import Recorder, Scribe, note_final
from tests.faults.stage import HookBlob
from tests.faults.validator import violations
from tests.fix_objects import ObjectServer


def test_writes_during_store_outage_wait_and_are_acknowledged_once(
    object_server: ObjectServer, object_url: str
) -> None:
    recorder = Recorder("w")
    with persist.open(object_url, writer="a", settings=Settings(background=False)) as client:
        scribe = Scribe(recorder, client)
        words = client.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
        scribe.append(words, [1], 0, 10)
        assert not client.statistics().failing

        before_ms = SYSTEM_CLOCK.now_ms()
        object_server.kill()
        outcomes: list[str] = []
        waiting = threading.Thread(
            target=lambda: outcomes.extend(scribe.burst(words, [[12], [15]], 20))
        )
        waiting.start()
        other = words.write([(("beside it", None), 30, 1)])
        try:
            until(lambda: bool(client.statistics().failing))
            until(lambda: client.statistics().failing[0].attempts >= 3)
            (failing,) = client.statistics().failing
            assert failing.operation == "create"
            assert failing.key.startswith("log/")
            assert before_ms <= failing.since_ms <= SYSTEM_CLOCK.now_ms()
            assert failing.error
            assert not outcomes
            assert not other.done()
            assert words.upper == 10
        finally:
            object_server.start()
            waiting.join(120)
        assert outcomes == ["acknowledged"] * 3
        assert isinstance(other.result(60), Appended)
        assert not client.statistics().failing
        assert client.statistics().retries >= 3
        client.discard_unsealed()  # The write that the history does not record.
        scribe.snapshot(words, 19)
        note_final(recorder, client, HookBlob(client._blob))
    found = violations(recorder.events)
    assert not found, "\n".join(map(str, found))


def until(happened: Callable[[], bool]) -> None:
    """Wait for the condition, at most one minute."""
    never = threading.Event()
    deadline = SYSTEM_CLOCK.boot_ms() + 60_000
    while not happened():
        assert SYSTEM_CLOCK.boot_ms() < deadline
        SYSTEM_CLOCK.wait(never, 20)
