"""Lifetime of the plan of a DataFrame, and the errors of its execution.

A DataFrame is returned to the user and read later, by an action that does not call our code. Two
duties remain: release the data that it reads when no plan can read it any more, and raise our error
when the read fails.

*Lifetime.* Plans derived from a plan share its leaves: the relation of a scan, the function of a
map. In a classic session the leaves are objects of the JVM; over Connect they are objects of this
process. Weak references to the leaves show when the last plan that shares them is collected.

*Errors.* PySpark converts every exception of the JVM, or of a Connect server, to a Python exception
in one function. We wrap this function and replace an exception that names one of our files with our
own error.
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

__all__ = ["call_when_unused", "explain_failures"]

log = logger("engine")

CHECK_INTERVAL_MS: Final = 5_000

UNREADABLE: Final = ("FAILED_READ_FILE", "PATH_NOT_FOUND")
"""Error conditions of Spark for a file that cannot be read."""

OURS: Final = re.compile(
    r'Corruption: object "([^"]+)" of location "([^"]+)" is damaged(?:\s*detail: ([^\n]*))?'
)
"""Our own error, as printed in the traceback of a Python worker."""

MISTYPED: Final = "FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH"
"""Condition that does not mean a damaged file: the requested type differs."""


def call_when_unused(scans: Sequence[DataFrame], call: Callable[[], None]) -> None:
    """Call `call` some time after the last plan with any of `scans`, or the session, has ended."""
    references: list[Any] = []
    for scan in scans:
        if connect(scan.sparkSession):
            # SUBTLE: a temporary view survives at the server, where we cannot observe it.
            references.append(_LocalReference(getattr(scan, "_plan")))  # noqa: B009 - not in the type.
        else:
            jvm: Any = scan.sparkSession._jvm
            references.append(jvm.java.lang.ref.WeakReference(_shared(scan)))
    _WATCH.add(references, call)


def explain_failures(explain: Callable[[str, str], Exception | None]) -> None:
    """Register `explain(path, reason)`, which may convert a failed file read to our error."""
    if explain not in _explanations:
        _explanations.append(explain)
    # SUBTLE: the Connect client is looked up in `sys.modules`, because an import needs grpc. It is
    # patched in the client module, not where the function is defined: the client has imported the
    # name.
    remote: Any = sys.modules.get("pyspark.sql.connect.client.core")
    _wrap_conversion(captured, _unreadable)
    if remote is not None:
        _wrap_conversion(remote, None)


_explanations: Final[list[Callable[[str, str], Exception | None]]] = []


Unreadable = Callable[[Any], tuple[str, str] | None]
"""Function that returns the unreadable file and the reason from an exception of the JVM."""


def _wrap_conversion(module: Any, unreadable: Unreadable | None) -> None:
    """Wrap the conversion of exceptions in `module`.

    `unreadable` inspects the original exception. Without it, the converted exception is inspected.
    """
    convert: Callable[..., Exception] = module.convert_exception
    if getattr(convert, "explains", False):
        return

    def converted(error: Any, *others: Any, **named: Any) -> Exception:
        made = convert(error, *others, **named)
        unreadable_file = _unreadable_from_text(made) if unreadable is None else unreadable(error)
        if unreadable_file is not None:
            for explain in _explanations:
                ours = explain(*unreadable_file)
                if ours is not None:
                    ours.__cause__ = made
                    return ours
        return made

    converted.explains = True  # type: ignore[attr-defined]
    module.convert_exception = converted


def _unreadable_from_text(made: Exception) -> tuple[str, str] | None:
    """Return file and reason from an exception of Connect, which has its causes only as text."""
    if ours := _ours(str(made)):
        return ours
    if not isinstance(made, PySparkException) or not _names_a_file(made.getCondition()):
        return None
    path = (made.getMessageParameters() or {}).get("path")
    lines = str(made).strip().splitlines()
    causes = [line.partition(": ")[2] for line in lines if line.startswith("Caused by: ")]
    return None if path is None else (path, causes[-1] if causes else lines[0])


def _ours(text: str) -> tuple[str, str] | None:
    """Return file and reason from the error text of a Python worker, which Spark passes on."""
    match = OURS.search(text)
    return None if match is None else (f"{match[2]}/{match[1]}", match[3] or "")


def _names_a_file(condition: str | None) -> bool:
    return (condition or "").partition(".")[0] in UNREADABLE and condition != MISTYPED


def _unreadable(error: Any) -> tuple[str, str] | None:
    """Return the unreadable file and the reason from the chain of causes."""
    last = ""
    unreadable_file: str | None = None
    for cause in _causes(error):
        try:
            last = str(cause.getMessage() or cause.getClass().getSimpleName())
            if ours := _ours(last):
                return ours
            names_file = hasattr(cause, "getCondition") and _names_a_file(cause.getCondition())
            if unreadable_file is None and names_file:
                unreadable_file = str(cause.getMessageParameters().get("path"))
        except Py4JError:
            continue
    return None if unreadable_file is None else (unreadable_file, last.partition("\n")[0])


def _causes(error: Any) -> Iterator[Any]:
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.getCause()


def _shared(scan: DataFrame) -> Any:
    """Return the object that all plans with `scan` in them share with it."""
    plan: Any = getattr(scan, "_jdf").queryExecution().analyzed()  # noqa: B009 - likewise.
    if plan.getClass().getSimpleName() == "LogicalRelation":
        return plan.relation()
    # A map of tasks. By position: the field has different names in different versions of Spark.
    return plan.productElement(0).func()


class _LocalReference:
    """Weak reference to an object of this process, with the interface of the JVM's references."""

    def __init__(self, shared: object) -> None:
        self._shared = weakref.ref(shared)

    def refersTo(self, _: None) -> bool:  # noqa: N802 - Java's name.
        return self._shared() is None


class _Watch:
    """Periodic check of weak references, which runs while there are any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[list[Any], Callable[[], None]]] = {}
        self._next = 0
        self._running = False

    def add(self, references: list[Any], call: Callable[[], None]) -> None:
        with self._lock:
            # By number: a comparison of references would call the JVM.
            self._watched[self._next] = (references, call)
            self._next += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="penstock-plans", daemon=True).start()

    def check(self) -> None:
        """Call the callbacks whose references are all cleared."""
        with self._lock:
            watched = dict(self._watched)
        unused = [n for n, (references, _) in watched.items() if not any(map(_alive, references))]
        for number in unused:
            with self._lock:
                due = self._watched.pop(number, None)
            if due is None:
                continue
            try:
                due[1]()
            except Exception as error:  # noqa: BLE001 - the other callbacks must run.
                log.warning("release of a scan failed", extra=fields(error=str(error)))

    def _run(self) -> None:
        never = threading.Event()
        while True:
            self._clock.wait(never, CHECK_INTERVAL_MS)
            self.check()
            with self._lock:
                if not self._watched:
                    self._running = False
                    return


def _alive(reference: Any) -> bool:
    try:
        # Not `get`, whose result would keep the object alive.
        return not reference.refersTo(None)
    except (Py4JError, OSError):
        return False  # The JVM has ended, and its plans with it.


_WATCH: Final = _Watch(SYSTEM_CLOCK)
