"""How long a DataFrame's plan lives, and what its failures say.

A DataFrame is handed out and read later, by an action of the user's that we
are not asked about. Two things are still ours to do: to let go of what it
reads once nobody can read it any more, and to have it fail with our error.

*Life.* Plans derived from a plan share its leaves: the relation of a scan, the
function of a map. In a classic session these are objects of the JVM, over
Connect they are objects here; weak references to them tell when the last plan
that shares them is gone.

*Failure.* PySpark turns every exception of the JVM, or of a Connect server, into
one of Python in one function. We stand before it, and give an exception that
names one of our files back as ours.
"""

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions import captured
from pyspark.sql import DataFrame

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.engine.spark import connect
from penstock.telemetry import fields, logger

__all__ = ["explain_failures", "when_unused"]

log = logger("engine")

LOOK_EVERY_MS: Final = 5_000

UNREADABLE: Final = ("FAILED_READ_FILE", "PATH_NOT_FOUND")
"""Spark's names for a file that cannot be read."""

OURS: Final = re.compile(
    r'Corruption: object "([^"]+)" of location "([^"]+)" is damaged(?:\s*detail: ([^\n]*))?'
)
"""Our own error, as a Python worker's traceback tells it."""

MISTYPED: Final = "FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH"
"""Among them, what says nothing of the file: it was asked for in another type."""


def when_unused(scans: Sequence[DataFrame], call: Callable[[], None]) -> None:
    """Call `call` some time after no plan has any of `scans` in it, or the session is gone."""
    references: list[Any] = []
    for scan in scans:
        if connect(scan.sparkSession):
            # SUBTLE: a temporary view lives on at the server, out of our sight.
            references.append(_Here(getattr(scan, "_plan")))  # noqa: B009 - not in the type.
        else:
            jvm: Any = scan.sparkSession._jvm
            references.append(jvm.java.lang.ref.WeakReference(_shared(scan)))
    _WATCH.add(references, call)


def explain_failures(explain: Callable[[str, str], Exception | None]) -> None:
    """Let `explain(path, reason)` turn the failure to read a file into an error of ours, or not."""
    if explain not in _explanations:
        _explanations.append(explain)
    # SUBTLE: the client of Connect is asked of `sys.modules`, because importing it needs
    # grpc; and it, not where the function is defined, because it has taken the name along.
    remote: Any = sys.modules.get("pyspark.sql.connect.client.core")
    _stand_before(captured, _unreadable)
    if remote is not None:
        _stand_before(remote, None)


_explanations: Final[list[Callable[[str, str], Exception | None]]] = []


Unreadable = Callable[[Any], tuple[str, str] | None]
"""Finds the file that could not be read, and why, in an exception of the JVM."""


def _stand_before(module: Any, unreadable: Unreadable | None) -> None:
    """Explain what `module` makes of exceptions; without `unreadable`, what it made of them."""
    convert: Callable[..., Exception] = module.convert_exception
    if getattr(convert, "explains", False):
        return

    def converted(error: Any, *others: Any, **named: Any) -> Exception:
        made = convert(error, *others, **named)
        found = _told(made) if unreadable is None else unreadable(error)
        if found is not None:
            for explain in _explanations:
                ours = explain(*found)
                if ours is not None:
                    ours.__cause__ = made
                    return ours
        return made

    converted.explains = True  # type: ignore[attr-defined]
    module.convert_exception = converted


def _told(made: Exception) -> tuple[str, str] | None:
    """The same from an exception of Connect, which has no causes but tells of them."""
    if ours := _ours(str(made)):
        return ours
    if not isinstance(made, PySparkException) or not _names_a_file(made.getCondition()):
        return None
    path = (made.getMessageParameters() or {}).get("path")
    lines = str(made).strip().splitlines()
    causes = [line.partition(": ")[2] for line in lines if line.startswith("Caused by: ")]
    return None if path is None else (path, causes[-1] if causes else lines[0])


def _ours(text: str) -> tuple[str, str] | None:
    """The same from what a Python worker raised, of which Spark hands on the text."""
    told = OURS.search(text)
    return None if told is None else (f"{told[2]}/{told[1]}", told[3] or "")


def _names_a_file(condition: str | None) -> bool:
    return (condition or "").partition(".")[0] in UNREADABLE and condition != MISTYPED


def _unreadable(error: Any) -> tuple[str, str] | None:
    """The file that could not be read, and why, from the chain of causes."""
    last = ""
    found: str | None = None
    for cause in _causes(error):
        try:
            last = str(cause.getMessage() or cause.getClass().getSimpleName())
            if ours := _ours(last):
                return ours
            told = hasattr(cause, "getCondition") and _names_a_file(cause.getCondition())
            if found is None and told:
                found = str(cause.getMessageParameters().get("path"))
        except Py4JError:
            continue
    return None if found is None else (found, last.partition("\n")[0])


def _causes(error: Any) -> Iterator[Any]:
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.getCause()


def _shared(scan: DataFrame) -> Any:
    """What all plans with `scan` in them have in common with it."""
    plan: Any = getattr(scan, "_jdf").queryExecution().analyzed()  # noqa: B009 - likewise.
    if plan.getClass().getSimpleName() == "LogicalRelation":
        return plan.relation()
    # A map of tasks. By position: the field's name differs between versions of Spark.
    return plan.productElement(0).func()


class _Here:
    """A weak reference to an object of this process, asked as those of the JVM are."""

    def __init__(self, shared: object) -> None:
        self._shared = weakref.ref(shared)

    def refersTo(self, _: None) -> bool:  # noqa: N802 - Java's name.
        return self._shared() is None


class _Watch:
    """Looks at weak references now and then, while there are any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[list[Any], Callable[[], None]]] = {}
        self._next = 0
        self._running = False

    def add(self, references: list[Any], call: Callable[[], None]) -> None:
        with self._lock:
            # By number: comparing references would ask the JVM.
            self._watched[self._next] = (references, call)
            self._next += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="penstock-plans", daemon=True).start()

    def look(self) -> None:
        """Call what is due."""
        with self._lock:
            watched = dict(self._watched)
        gone = [n for n, (references, _) in watched.items() if not any(map(_alive, references))]
        for number in gone:
            with self._lock:
                due = self._watched.pop(number, None)
            if due is None:
                continue
            try:
                due[1]()
            except Exception as error:  # noqa: BLE001 - the thread's door: the others go on.
                log.warning("a reading could not be ended", extra=fields(error=str(error)))

    def _run(self) -> None:
        never = threading.Event()
        while True:
            self._clock.wait(never, LOOK_EVERY_MS)
            self.look()
            with self._lock:
                if not self._watched:
                    self._running = False
                    return


def _alive(reference: Any) -> bool:
    try:
        # Not `get`, whose answer would keep alive what it asks about.
        return not reference.refersTo(None)
    except (Py4JError, OSError):
        return False  # The JVM is gone, and its plans with it.


_WATCH: Final = _Watch(SYSTEM_CLOCK)
