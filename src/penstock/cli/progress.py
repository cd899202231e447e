"""What goes on, said while it does."""

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock.catalog.json_rows import encode_line
from penstock.clock import SYSTEM_CLOCK
from penstock.progress.time import describe_time

if TYPE_CHECKING:
    from penstock.pipeline.supervisor import Supervisor

__all__ = ["Teller"]

TOLD_EVERY_MS: Final = 1_000
BEHIND_MS: Final = 5_000
"""From here on, that something is behind is news, and so is that it is not any more."""

COUNTED: Final = {"source": "rows", "materialization": "documents"}
"""What is counted of each kind of task."""


class Teller:
    """Says on standard error what goes on, when that has changed."""

    def __init__(self, stop: threading.Event, for_seconds: int | None, *, as_json: bool) -> None:
        """`for_seconds` begin with the first row that is where the last of the tasks brings it."""
        from penstock.cli.copying import Copies

        self._stop = stop
        self._for_seconds = for_seconds
        self._as_json = as_json
        self._said: dict[str, object] = {}
        self._copies = Copies()

    def start(self, running: "Supervisor") -> None:
        """Begin to look."""
        threading.Thread(target=self._look, args=(running,), daemon=True).start()

    def _look(self, running: "Supervisor") -> None:
        first_row_ms: int | None = None
        while not SYSTEM_CLOCK.wait(self._stop, TOLD_EVERY_MS):
            told = running.status()
            with suppress(OSError):  # Nobody may be there to hear it.
                self._tell_all(told)
            if first_row_ms is None and _has_rows(told):
                first_row_ms = SYSTEM_CLOCK.boot_ms()
            if (
                self._for_seconds is not None
                and first_row_ms is not None
                and SYSTEM_CLOCK.boot_ms() - first_row_ms >= self._for_seconds * 1_000
            ):
                self._stop.set()
        self._copies.close()
        if not self._as_json and running.fenced() is None:
            with suppress(OSError):
                sys.stderr.write("stopping; what is under way is brought to its end\n")

    def _tell_all(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        for name, status in told.items():
            self._tell(name, status)
        if not self._as_json:
            for line in self._copies.lines(told):
                self._say(line.partition(":")[0], line)

    def _tell(self, name: str, status: Mapping[str, Any]) -> None:
        kind = status["kind"]
        if self._as_json:
            self._say(name, encode_line({kind: name, **status}))
        else:
            self._say(name, _line(name, status), news=_news(status))

    def _say(self, name: str, line: str, *, news: object = None) -> None:
        """Say a line, if there is news since the last of that name; else if it is another."""
        news = line if news is None else news
        if self._said.get(name) != news:
            self._said[name] = news
            sys.stderr.write(line + "\n")


def _line(name: str, status: Mapping[str, Any]) -> str:
    counted = COUNTED[status["kind"]]
    state = status["state"]
    phase = status.get("phase") or "starting"
    line = f"{name}: {phase if state == 'running' else state}, {status.get(counted, 0)} {counted}"
    if "lsn" in status:
        line += f", at {status['lsn']}"
    if status.get("lag_bytes") is not None:
        line += f", {status['lag_bytes']} bytes behind"
    if status.get("lag_records") is not None:
        line += f", {status['lag_records']} records behind"
    if lag_ms := status.get("lag_ms"):
        line += f", {lag_ms / 1_000:.1f} s behind"
    if (error := status["error"]) and state != "running":
        return f"{line}: {error['message']}"
    if error and phase == "stopped":
        return f"{line}: {error['message']}"
    for each in status.get("degraded") or ():
        since = describe_time(each["time"])
        line += f"; {each['collection']} is in error since {since}: {each['message']}"
        line += f". {each['hint']}" if each["hint"] else ""
    if waits := status.get("waits_for"):
        line += f", waiting for {waits}"
    return line


def _news(status: Mapping[str, Any]) -> object:
    """What is worth a line: not that time passes, nor transactions that bring nothing."""
    phase = status.get("phase")
    return (
        status["state"],
        "following" if phase == "storing" else phase,
        status.get(COUNTED[status["kind"]]),
        (status.get("lag_ms") or 0) >= BEHIND_MS,
        status.get("waits_for"),
        str(status["error"]),
        str(status.get("degraded")),
    )


def _has_rows(told: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether something has come through, to the end of what runs here, by now or before."""
    last = [each for each in told.values() if each["kind"] == "materialization"]
    return any(
        each.get(COUNTED[each["kind"]]) or each.get("transactions") or each.get("as_of")
        for each in last or told.values()
    )
