"""Client under faults: forks, callbacks, dropped clients, idle listeners, foreign entries."""

import gc
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from tests.persist.shop import next_changes

import penstock.persist as persist
from penstock.durable import open_blob
from penstock.errors import Fenced, StoreRefused, UsageError
from penstock.persist.machine import Machine
from penstock.persist.notify import NotificationListener, Notifier, Wakeups

SETTINGS = persist.Settings(background=False, notify="", inline_bytes=64, settle_ms=0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'data'}"


def opened(url: str) -> persist.Client:
    return persist.open(url, writer="w", settings=SETTINGS)


def words_of(client: persist.Client) -> persist.Collection:
    return client.create_or_load("words", key="text", value="unit")


def files(url: str, room: str) -> list[Path]:
    return sorted(p for p in (Path(url.removeprefix("file:")) / room).rglob("*") if p.is_file())


def test_forked_child_does_not_release_lock_of_parent(url):
    script = f"""
import os, sys, penstock.persist as p
c = p.open({url!r}, writer="w")
w = c.create_or_load("words", key="text", value="unit")
if os.fork() == 0:
    try:
        w.write([(("child", None), 0, 1)])
    except p.Closed:
        sys.exit(3)
    except Exception as error:
        sys.exit(0 if "fork" in str(error) else 4)
    sys.exit(5)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 0, status
print(w.compare_and_append([(("parent", None), 0, 1)], 0, 1))
c.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Appended" in done.stdout


def test_client_remains_usable_after_keyboard_interrupt_in_a_call(url):
    script = f"""
import os, signal, threading, penstock.persist as p
with p.open({url!r}, writer="w") as c:
    w = c.create_or_load("words", key="text", value="unit")
    stop = threading.Event()
    def strike():
        while not stop.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)
    striker = threading.Thread(target=strike)
    struck, upper = 0, 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while struck < 5:
        try:
            if not striker.is_alive() and not stop.is_set():
                striker.start()
            while True:
                upper = w.upper
                w.compare_and_append([((str(upper), None), upper, 1)], upper, upper + 1)
        except KeyboardInterrupt:
            struck += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.set()
    striker.join()
    upper = w.seal(w.upper + 1).result().upper - 1
    assert len(w.snapshot(upper)) in (upper, upper + 1), (len(w.snapshot(upper)), upper)
    print("whole")
p.open({url!r}, writer="another").close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "whole\n"


def test_client_context_keeps_body_error_when_close_fails(url):
    def body() -> None:
        with opened(url):
            opened(url).close()  # Takes over: closing the first client raises Fenced.
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    assert any("closing failed too" in note for note in caught.value.__notes__)


def test_fenced_client_collected_as_garbage_logs_warning(url, caplog):
    client = opened(url)
    opened(url).close()
    with caplog.at_level(logging.WARNING, "penstock"):
        del client
        gc.collect()
    assert "a forgotten client could not be closed" in caplog.text


def test_client_close_from_its_own_callback_raises_usage_error(url):
    said: list[BaseException] = []
    told = threading.Event()

    def close(_: object) -> None:
        try:
            client.close()
        except UsageError as error:
            said.append(error)
        told.set()

    with opened(url) as client:
        words = words_of(client)
        # Large enough to be in flight when the callback is added.
        written = words.write([((str(i), None), 0, 1) for i in range(20_000)])
        written.add_done_callback(close)
        assert told.wait(30)
        assert words.seal(1).result() == persist.Appended(1)
    assert len(said) == 1


def test_open_listener_keeps_its_client_alive(url):
    with opened(url) as client:
        words_of(client).compare_and_append([(("a", None), 0, 1)], 0, 1)
    listener = persist.open(url, settings=SETTINGS).collection("words").listen(-1)
    gc.collect()
    assert len(next_changes(listener)) == 1
    listener.close()
    with pytest.raises(UsageError, match="is closed"):
        listener.next_changes(timeout_ms=0)


def test_listener_with_failing_hold_writes_receives_all_changes(url, monkeypatch):
    with opened(url) as client:
        words = words_of(client)
        words.compare_and_append([(("a", None), 0, 1)], 0, 1)
        settings = persist.Settings(background=False, notify="", lease_ms=1)
        with persist.open(url, settings=settings) as reader:
            listener = reader.collection("words").listen(-1, snapshot=True)
            real = reader._blob.create

            def refused(key: str, data: bytes) -> bool:
                if key.startswith("hold/"):
                    raise StoreRefused("disk is full")
                return real(key, data)

            monkeypatch.setattr(reader._blob, "create", refused)
            snapshot = listener.next_changes(timeout_ms=0)
            assert isinstance(snapshot, persist.Snapshot)
            assert [len(snapshot), len(next_changes(listener))] == [0, 1]
            words.compare_and_append([(("b", None), 1, 1)], 1, 2)
            assert [data for data, _, _ in next_changes(listener)] == [("b", None)]
            monkeypatch.undo()
            listener.close()


def test_listener_of_fenced_writer_raises_fenced(url):
    settings = persist.Settings(background=False, notify="", poll_ms=1)
    client = persist.open(url, writer="w", settings=settings)
    listener = words_of(client).listen(-1)
    opened(url).close()
    with pytest.raises(Fenced):
        next(iter(listener))
    with pytest.raises(Fenced):
        client.close()


def test_idle_listener_does_not_retain_merged_files_of_other_collections(url):
    with opened(url) as client:
        idle = client.create_or_load("idle", key="text", value="unit")
        busy = words_of(client)
        with idle.listen(-1) as listener:
            for time in range(10):
                rows = [((f"{time}-{i}", None), time, 1) for i in range(50)]
                busy.compare_and_append(rows, time, time + 1)
                client.compact()
                assert listener.next_changes(timeout_ms=0) is None
            client.compact()
            assert len(files(url, "batch")) <= 2


def test_maintenance_deletes_files_of_destroyed_collection(url):
    with opened(url) as client:
        words = words_of(client)
        words.compare_and_append([((str(i), None), 0, 1) for i in range(500)], 0, 1)
        assert files(url, "batch")
        assert words.destroy()
        client.run_maintenance()
        assert not files(url, "batch")
        assert words_of(client).upper == 0


def test_damaged_hold_stops_compaction_but_not_appends(url):
    with opened(url) as client:
        words = words_of(client)
        words.compare_and_append([(("a", None), 0, 1)], 0, 5)
        client.hold("owner").move({"words": 1})
        (path,) = files(url, "hold")[-1:]
        path.write_bytes(b"junk")
        assert words.allow_compaction(3).result().since == 0
        words.compare_and_append([(("b", None), 5, 1)], 5, 6)
        for each in files(url, "hold"):
            each.unlink()
        client.run_maintenance()
        assert words.since == 3


def test_log_entry_of_other_location_is_void(url, tmp_path):
    other = f"file:{tmp_path / 'other'}"
    with opened(url) as client, opened(other) as stranger:
        words_of(client).compare_and_append([(("a", None), 0, 1)], 0, 1)
        words_of(stranger).compare_and_append([(("x", None), 0, 1)], 0, 5)
        number = client.state.seqno
        foreign = stranger._machine.log.read(number - 1)
        blob = open_blob(url)
        assert foreign is not None
        assert Machine(blob, SETTINGS).log.create(number, foreign)
        words = words_of(client)
        assert words.compare_and_append([(("b", None), 1, 1)], 1, 2) == persist.Appended(2)
        assert {data[0] for data, _, _ in words.snapshot(1)} == {"a", "b"}
        blob.close()


def test_append_in_removed_folder_raises_store_refused(url):
    client = opened(url)
    words = words_of(client)
    words.compare_and_append([(("a", None), 0, 1)], 0, 1)
    shutil.rmtree(url.removeprefix("file:"))
    with pytest.raises(StoreRefused):
        words.compare_and_append([(("b", None), 1, 1)], 1, 2)
    with pytest.raises(StoreRefused):
        client.close()


def test_seal_all_with_same_collection_twice_raises_usage_error(url):
    with opened(url) as client:
        words = words_of(client)
        with pytest.raises(UsageError, match="twice"):
            client.seal_all({words: 10, client.collection("words"): 5})


def test_writer_with_unusable_notify_address_still_appends(url):
    settings = persist.Settings(background=False, notify="256.1.1.1")
    with persist.open(url, writer="w", settings=settings) as client:
        words_of(client).compare_and_append([(("a", None), 0, 1)], 0, 1)


def test_slow_and_fast_listeners_receive_schema_change_at_same_time(url):
    small = pa.schema([("k", pa.string())])
    large = small.append(pa.field("n", pa.int64()))
    with opened(url) as client:
        rows = client.create_or_load("rows", schema=small)
        slow, fast = rows.listen(-1), rows.listen(-1)
        rows.compare_and_append([({"k": "a"}, 0, 1)], 0, 1)
        given = [list(next_changes(fast))]
        rows.alter(large)
        rows.compare_and_append([({"k": "b", "n": 1}, 1, 1)], 1, 2)
        given.append(list(next_changes(fast)))
        assert [list(next_changes(slow)) for _ in range(2)] == given
        assert given[0][0].data == {"k": "a"}
        slow.close()
        fast.close()


def test_notifier_wakes_reader_before_its_poll_interval(url):
    settings = persist.Settings(poll_ms=60_000)
    with persist.open(url, writer="w", settings=settings) as client:
        words = words_of(client)
        with persist.open(url, settings=settings) as reader:
            given: list[int] = []
            listening = threading.Event()

            def listen() -> None:
                with reader.collection("words").listen(-1) as listener:
                    listening.set()
                    for _ in range(3):
                        changes = next_changes(listener, timeout_ms=50_000)
                        given.append(changes.upper)

            thread = threading.Thread(target=listen)
            thread.start()
            assert listening.wait(30)
            for time in range(3):
                words.compare_and_append([((str(time), None), time, 1)], time, time + 1)
                while len(given) <= time and thread.is_alive():
                    thread.join(0.01)
            thread.join(30)
            assert given == [1, 2, 3]


def test_notification_listener_ignores_notifier_of_other_location():
    notifier = Notifier("127.0.0.1")
    notifier.start("l1")
    wakeups = Wakeups()
    told = wakeups.subscribe()
    notifications = NotificationListener(wakeups)
    try:
        notifications.connect(notifier.address, "l2")  # Another location, ignored.
        notifications.connect(notifier.address, "l1")
        assert not told.is_set()
        other = NotificationListener(wakeups)
        other.connect(notifier.address, "l1")
        while not told.wait(0.01):
            notifier.notify(7)
        other.close()
    finally:
        notifications.close()
        notifier.close()


def test_fenced_client_context_raises_fenced_without_close_note(tmp_path):
    url = f"file:{tmp_path}"
    with (
        pytest.raises(Fenced) as fenced,
        persist.open(url, writer="w") as first,
        persist.open(url, writer="w"),
    ):
        first.create_or_load("words", key=persist.TEXT, value=persist.UNIT)
    assert all("closing" not in note for note in getattr(fenced.value, "__notes__", []))
