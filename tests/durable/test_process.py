"""Identity of processes with reused process ids, machine restarts and other hosts."""

import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.durable import process
from penstock.durable.process import identify, is_alive, is_dead


def test_running_process_is_alive() -> None:
    own = identify()
    assert is_alive(own)
    assert not is_dead(own)


def test_killed_process_is_dead_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert is_alive(identity)
    child.kill()
    child.communicate()
    assert is_dead(identity)
    assert not is_alive(identity)


def test_process_with_reused_process_id_is_dead() -> None:
    own = identify()
    earlier = replace(own, start=own.start - 1)
    assert is_dead(earlier)
    assert not is_alive(earlier)


def test_process_of_earlier_boot_is_dead_only_on_same_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_machine_id", lambda: "this one")
    before = replace(identify(), boot="earlier")
    assert is_dead(before)
    for machine in ("", "another one"):
        elsewhere = replace(before, machine=machine)
        assert not is_dead(elsewhere)
        assert not is_alive(elsewhere)


def test_process_recorded_by_older_release_is_neither_alive_nor_dead() -> None:
    unknown = replace(identify(), boot="", machine="", start=0)
    assert not is_alive(unknown)
    assert not is_dead(unknown)
