"""RetryingBlob: a store that retries transient errors.

An operation with a transient error is repeated with the same bytes until its outcome is known.
Other errors are raised at once (`retry.policy_of`). Callers therefore get a determinate outcome,
unless they limit the time for retries.

`create` is the subtle case. An attempt with a lost answer may have succeeded, and the next
attempt then finds that the key exists, possibly created by this process. The bytes decide: where
it matters, they contain a token that no other writer uses.

    happened  answered
       yes       yes     True, or False if another writer created the key
       yes       no      repeated: the key exists with equal bytes, so True
       no        yes     an error, which is retried or raised
       no        no      repeated like a first attempt

A `create` ends only when its key exists (hazard A3). A missing key after a lost answer proves
nothing, because the write may still be in flight.
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

__all__ = ["Failing", "RetryingBlob", "StoreStatistics"]

_Answer = TypeVar("_Answer")

log = logger("durable")


@dataclass(frozen=True, slots=True)
class Failing:
    """An operation that has failed and is retried."""

    operation: str
    key: str
    since_ms: int
    """Calendar time of the first failure."""

    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counters since a store was opened, and the operations that fail now."""

    operations: int = 0
    retries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    failing: tuple[Failing, ...] = ()


class RetryingBlob:
    """A `Blob` that retries the operations of `inner`.

    With `patience_ms`, an operation that has failed for that long raises its last error:
    `DeterminateError` if the outcome of every attempt is known, otherwise `IndeterminateError`.
    `close` ends waiting operations in the same way, and so does `stop`, after a third of the stop
    deadline.
    """

    def __init__(
        self,
        inner: Blob,
        clock: Clock,
        rng: random.Random,
        patience_ms: int | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._stop = stop
        self._inner = inner
        self._clock = clock
        self._rng = rng
        self._patience_ms = patience_ms
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._operations = self._retries = self._bytes_read = self._bytes_written = 0
        self._failing: dict[int, Failing] = {}

    @property
    def name(self) -> str:
        """Name of the inner store."""
        return self._inner.name

    def get(self, key: str, *, start: int = 0) -> bytes | None:
        data = self._run("get", key, lambda: self._inner.get(key, start=start))
        self._count(bytes_read=len(data or b""))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._run("put", key, lambda: self._inner.put(key, data))
        self._count(bytes_written=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Return whether this call created the object, even if an answer was lost. See `Blob`."""
        with self._operation("create", key) as attempts:
            created = self._answer(attempts, lambda: self._inner.create(key, data))
            if not created and attempts.indeterminate is not None:
                created = self._is_own(attempts, key, data)
        if created:
            self._count(bytes_written=len(data))
        return created

    def settle(self, keys: list[str]) -> None:
        self._run("settle", keys[0] if keys else "", lambda: self._inner.settle(keys))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete(key))

    def statistics(self) -> StoreStatistics:
        """Return the counters and the operations that fail now."""
        with self._lock:
            return StoreStatistics(
                operations=self._operations,
                retries=self._retries,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                failing=tuple(self._failing.values()),
            )

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        return self._run("list", prefix, lambda: self._inner.list(prefix, after=after))

    def close(self) -> bool:
        """Close the store. Operations that wait for a retry raise their last error. See `Blob`."""
        self._stopped.set()
        return self._inner.close()

    def _run(self, verb: str, key: str, operation: Callable[[], _Answer]) -> _Answer:
        with self._operation(verb, key) as attempts:
            return self._answer(attempts, operation)

    def _is_own(self, attempts: "_Attempts", key: str, data: bytes) -> bool:
        stored = self._answer(attempts, lambda: self._inner.get(key))
        if stored is None:
            # The key existed a moment ago. The deleted object may have been the one created here.
            raise IndeterminateError(
                f'outcome of create of object "{key}" of location "{self.name}" is unknown',
                detail="The key existed and has been deleted since. Its creator is not known.",
            ) from attempts.indeterminate
        if stored != data:
            return False
        # The answer was lost, so the object may not be durable yet.
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
        # A generator of its own for each operation: threads do not share one.
        with self._lock:
            rng = random.Random(self._rng.getrandbits(64))
        yield from pauses_ms(rng)

    def _answer(self, attempts: "_Attempts", operation: Callable[[], _Answer]) -> _Answer:
        """Repeat an operation until it succeeds or fails with an error that is not transient."""
        while True:
            try:
                answer = operation()
            except UsageError:
                if attempts.error is None or not self._stopped.is_set():
                    raise
                raise attempts.outcome(attempts.error) from None  # Closed between attempts.
            except StoreError as error:
                first = attempts.error is None
                attempts.record(error)
                if policy_of(error) is not Policy.REPEAT:
                    raise attempts.outcome(error) from error.__cause__
                self._report(attempts, error, first=first)
                if not self._wait(attempts):
                    raise attempts.outcome(error) from error.__cause__
                self._count(retries=1)
            else:
                self._recovered(attempts)
                return answer

    def _wait(self, attempts: "_Attempts") -> bool:
        """Pause before the next attempt, and return whether there is one."""
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
            if self._clock.wait(self._stopped, min(until_ms - now_ms, _STOP_CHECK_MS)):
                return False
        return True

    def _report(self, attempts: "_Attempts", error: StoreError, *, first: bool) -> None:
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
        if first or boot_ms - attempts.logged_boot_ms >= _LOG_INTERVAL_MS:
            attempts.logged_boot_ms = boot_ms
            log.warning(
                "store operation failed; retrying",
                extra=fields(
                    operation=attempts.verb,
                    key=attempts.key,
                    store=self.name,
                    error=type(error).__name__,
                    since=_format_ms(attempts.since_ms),
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
    """The attempts of one operation so far."""

    verb: str
    key: str
    pauses: Iterator[int]
    failed: int = 0
    since_ms: int = 0
    since_boot_ms: int = 0
    logged_boot_ms: int = 0
    stopped_boot_ms: int = 0
    """When the operation first found the stop event set; 0 if it did not."""

    error: StoreError | None = None
    """Error of the last attempt, if it failed."""

    indeterminate: IndeterminateError | None = None
    """Error of the last attempt with an unknown outcome."""

    def record(self, error: StoreError) -> None:
        self.failed += 1
        self.error = error
        if isinstance(error, IndeterminateError):
            self.indeterminate = error

    def outcome(self, error: StoreError) -> StoreError:
        """Return the error of the operation, given the error of its last attempt.

        SUBTLE: the last attempt wrote nothing, but an earlier one may have. The outcome is
        determinate only if the outcome of every attempt is known.
        """
        if self.indeterminate is None or not isinstance(error, DeterminateError):
            return error
        return IndeterminateError(
            f'outcome of {self.verb} of object "{self.key}" is unknown',
            detail=f"An earlier attempt may have succeeded. The last attempt failed: {error}.",
            hint=error.hint,
        )


def _format_ms(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds")


_LOG_INTERVAL_MS: Final = 30_000
_STOP_CHECK_MS: Final = 200
"""Interval of checks of the stop event."""
