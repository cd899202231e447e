"""A store that keeps asking.

What is about the moment is asked again, with the same bytes, until it is
known; what is not is told at once (`retry.policy_of`). Nobody above this has
to wonder whether a write happened, except where they asked for little patience.

The one subtle case is `create`. An attempt whose answer was lost may have
landed, and the next attempt then finds the key taken, perhaps by ourselves.
The bytes tell: where it matters they carry a token that nobody else writes.

    happened  answered
       yes       yes     True, or False if it was another's
       yes       no      asked again: taken, bytes equal, so True
       no        yes     an error that is asked again, or told
       no        no      asked again as if it were the first time

An attempt ends only when its key is occupied (hazard A3): "not there" read
after a lost answer proves nothing, since the write may still be on its way.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

from penstock.clock import Clock
from penstock.deadlines import stop_timeout_s
from penstock.durable.blob import Blob, Listed
from penstock.errors import DeterminateError, IndeterminateError, StoreError, UsageError
from penstock.retry import Policy, pauses_ms, policy_of
from penstock.telemetry import fields, logger

__all__ = ["Failing", "SteadyBlob", "SteadyStatistics"]

_Answer = TypeVar("_Answer")

log = logger("durable")


@dataclass(frozen=True, slots=True)
class Failing:
    """An operation that has failed and is being asked again."""

    operation: str
    key: str
    since_ms: int
    """When it first failed, by the calendar."""

    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class SteadyStatistics:
    """What a store has done since it was opened, and what it cannot do right now."""

    operations: int = 0
    retries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    failing: tuple[Failing, ...] = ()


class SteadyBlob:
    """A `Blob` that asks `inner` again.

    With `patience_ms`, an operation that has failed for that long gives its
    last error: `DeterminateError` if no attempt was ever in doubt, otherwise
    `IndeterminateError`. Closing ends waiting operations in the same way, and
    so does `stop`, after a third of the stop deadline.
    """

    def __init__(
        self,
        inner: Blob,
        clock: Clock,
        chance: random.Random,
        patience_ms: int | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._stop = stop
        self._inner = inner
        self._clock = clock
        self._chance = chance
        self._patience_ms = patience_ms
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._operations = self._retries = self._bytes_read = self._bytes_written = 0
        self._failing: dict[int, Failing] = {}

    @property
    def name(self) -> str:
        """The name of the store within."""
        return self._inner.name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        """See `Blob`."""
        data = self._asked("get", key, lambda: self._inner.get(key, start=start))
        self._count(bytes_read=len(data or b""))
        return data

    def put(self, key: str, data: bytes) -> None:
        """See `Blob`."""
        self._asked("put", key, lambda: self._inner.put(key, data))
        self._count(bytes_written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """See `Blob`. Never false of what was ours, and never true of another's."""
        with self._operation("create", key) as attempts:
            created = self._answer(attempts, lambda: self._inner.create(key, data))
            if not created and attempts.in_doubt is not None:
                created = self._ours(attempts, key, data)
        if created:
            self._count(bytes_written=len(data))
        return created

    def settle(self, keys: list[str]) -> None:
        """See `Blob`."""
        self._asked("settle", keys[0] if keys else "", lambda: self._inner.settle(keys))

    def delete(self, key: str) -> None:
        """See `Blob`."""
        self._asked("delete", key, lambda: self._inner.delete(key))

    def statistics(self) -> SteadyStatistics:
        """Counts, and the operations that are failing right now."""
        with self._lock:
            return SteadyStatistics(
                operations=self._operations,
                retries=self._retries,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                failing=tuple(self._failing.values()),
            )

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """See `Blob`."""
        return self._asked("list", prefix, lambda: self._inner.list(prefix, after=after))

    def close(self) -> bool:
        """See `Blob`. Operations that wait to ask again end with their last error."""
        self._stopped.set()
        return self._inner.close()

    def _asked(self, verb: str, key: str, ask: Callable[[], _Answer]) -> _Answer:
        with self._operation(verb, key) as attempts:
            return self._answer(attempts, ask)

    def _ours(self, attempts: "_Attempts", key: str, data: bytes) -> bool:
        there = self._answer(attempts, lambda: self._inner.get(key))
        if there is None:
            # Taken a moment ago and gone now: someone deleted what may have been ours.
            raise IndeterminateError(
                f'create of object "{key}" of location "{self.name}" is in doubt',
                detail="The key was taken and has been deleted since; by whom is not known.",
            ) from attempts.in_doubt
        if there != data:
            return False
        # Whoever wrote it was not told so: nobody has seen to it that it lasts.
        self._answer(attempts, lambda: self._inner.settle([key]))
        return True

    @contextmanager
    def _operation(self, verb: str, key: str) -> Iterator["_Attempts"]:
        if self._stopped.is_set():
            raise UsageError(f'location "{self.name}" is closed', hint="Open it again.")
        with self._lock:
            self._operations += 1
        attempts = _Attempts(verb, key, self._pauses())
        try:
            yield attempts
        finally:
            if attempts.failed:
                with self._lock:
                    self._failing.pop(id(attempts), None)

    def _pauses(self) -> Iterator[int]:
        """Threads do not share one chance: an operation that fails draws its own from it."""
        with self._lock:
            chance = random.Random(self._chance.getrandbits(64))
        yield from pauses_ms(chance)

    def _answer(self, attempts: "_Attempts", ask: Callable[[], _Answer]) -> _Answer:
        """Ask until there is an answer, or an error that is not about the moment."""
        while True:
            try:
                answer = ask()
            except UsageError:
                if attempts.error is None or not self._stopped.is_set():
                    raise
                raise attempts.outcome(attempts.error) from None  # Closed between two attempts.
            except StoreError as error:
                first = attempts.error is None
                attempts.note(error)
                if policy_of(error) is Policy.SURFACE:
                    raise attempts.outcome(error) from error.__cause__
                self._show(attempts, error, first=first)
                if not self._waited(attempts):
                    raise attempts.outcome(error) from error.__cause__
                self._count(retries=1)
            else:
                self._recovered(attempts)
                return answer

    def _waited(self, attempts: "_Attempts") -> bool:
        """Pause before asking again; False if there is no more asking."""
        pause_ms = next(attempts.pauses)
        if self._patience_ms is not None:
            left_ms = attempts.since_boot_ms + self._patience_ms - self._clock.boot_ms()
            if left_ms <= 0:
                return False
            pause_ms = min(pause_ms, left_ms)
        if self._stop is None:
            return not self._clock.wait(self._stopped, pause_ms)
        until_ms = self._clock.boot_ms() + pause_ms
        while (now_ms := self._clock.boot_ms()) < until_ms:
            if self._stop.is_set():
                attempts.stopped_boot_ms = attempts.stopped_boot_ms or now_ms
                if now_ms - attempts.stopped_boot_ms >= stop_timeout_s() / 3 * 1_000:
                    return False
            if self._clock.wait(self._stopped, min(until_ms - now_ms, _LOOK_MS)):
                return False
        return True

    def _show(self, attempts: "_Attempts", error: StoreError, *, first: bool) -> None:
        boot_ms = self._clock.boot_ms()
        if first:
            attempts.since_ms, attempts.since_boot_ms = self._clock.now_ms(), boot_ms
        with self._lock:
            self._failing[id(attempts)] = Failing(
                operation=attempts.verb,
                key=attempts.key,
                since_ms=attempts.since_ms,
                attempts=attempts.failed,
                error=str(error),
            )
        if first or boot_ms - attempts.told_boot_ms >= _TELL_EVERY_MS:
            attempts.told_boot_ms = boot_ms
            log.warning(
                "store operation fails",
                extra=fields(
                    operation=attempts.verb,
                    key=attempts.key,
                    store=self.name,
                    error=type(error).__name__,
                    since=_shown_ms(attempts.since_ms),
                    attempts=attempts.failed,
                ),
            )

    def _recovered(self, attempts: "_Attempts") -> None:
        if attempts.error is None:
            return
        attempts.error = None
        with self._lock:
            self._failing.pop(id(attempts), None)
        log.info(
            "store operation recovered",
            extra=fields(
                operation=attempts.verb,
                key=attempts.key,
                store=self.name,
                failed_ms=self._clock.boot_ms() - attempts.since_boot_ms,
                attempts=attempts.failed,
            ),
        )

    def _count(self, *, retries: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        with self._lock:
            self._retries += retries
            self._bytes_read += bytes_read
            self._bytes_written += bytes_written


@dataclass(slots=True)
class _Attempts:
    """What became of one operation's attempts so far."""

    verb: str
    key: str
    pauses: Iterator[int]
    failed: int = 0
    since_ms: int = 0
    since_boot_ms: int = 0
    told_boot_ms: int = 0
    stopped_boot_ms: int = 0
    """When the operation first found the stop event set; 0 if it did not."""

    error: StoreError | None = None
    """The last attempt's, unless that was answered."""

    in_doubt: IndeterminateError | None = None
    """The last attempt of which it is not known whether it happened, if there was one."""

    def note(self, error: StoreError) -> None:
        """Count a failed attempt."""
        self.failed += 1
        self.error = error
        if isinstance(error, IndeterminateError):
            self.in_doubt = error

    def outcome(self, error: StoreError) -> StoreError:
        """What may be said of the whole, given its last error.

        SUBTLE: the last attempt did nothing, but an earlier one may have, so
        "nothing was written" is said only if none was ever in doubt.
        """
        if self.in_doubt is None or not isinstance(error, DeterminateError):
            return error
        return IndeterminateError(
            f'{self.verb} of object "{self.key}" is in doubt',
            detail=f"An earlier attempt may have succeeded. The last one: {error}.",
            hint=error.hint,
        )


def _shown_ms(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds")


_TELL_EVERY_MS: Final = 30_000
_LOOK_MS: Final = 200
"""Longest wait between two looks at the stop event."""
