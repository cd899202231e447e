"""Choice of the reader for the files of a storage location.

The reader depends on the scheme of the location:

file:      Spark's own reader, if every executor sees the same folder (hazard C11)
s3:        Spark's own reader if it has an S3 file system that works,
           else Spark tasks that read through our store
memory:    no reader; the contents are in one process, and Spark tasks run in others
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.durable import normal
from penstock.engine.spark import connect, local
from penstock.errors import TransientError, UsageError
from penstock.telemetry import fields, logger

__all__ = ["find_native_root"]

log = logger("engine")

PROBES: Final = 16
"""Number of probe tasks if the number of slots is not known."""


PROBE_RESULT: Final = "host string, seen boolean"

PATTERN: Final = frozenset("*?[]{}\\")
"""Characters that make Spark treat a path as a pattern."""


def find_native_root(spark: SparkSession, url: str) -> str | None:
    """Return the location as Spark's file systems name it; None if only our own store reaches it.

    Raises:
        UsageError: Spark's tasks cannot reach it at all.
    """
    whole = normal(url)
    session = _session_id(spark)
    with _lock:
        known = _known.get((session, whole))
    if known is None:
        known = _select_reader(spark, whole)
        with _lock:
            _known[session, whole] = known
    root, why = known
    reader = "tasks" if root is None else "native"
    log.info("reader selected", extra=fields(location=whole, reader=reader, because=why))
    return root


_lock: Final = Lock()
_known: Final[dict[tuple[str, str], tuple[str | None, str]]] = {}


def _select_reader(spark: SparkSession, url: str) -> tuple[str | None, str]:
    scheme, _, rest = url.partition(":")
    if scheme == "memory":
        raise UsageError(
            f'location "{url}" cannot be reached by Spark',
            detail="It is in the memory of this process, and Spark's tasks run in others.",
            hint="Use a location of files, for example file:./data.",
        )
    if scheme == "file":
        if not local(spark):
            _check_shared(spark, url, Path(rest))
        if PATTERN.intersection(rest):
            # SUBTLE: an option disables patterns, but then Spark reads several such files twice.
            return None, "Spark would treat its path as a pattern"
        return f"file:{rest}", "all tasks see the folder"
    if connect(spark):
        return None, "the S3 file system of a Connect server is unknown"
    return _s3(spark, url)


def _s3(spark: SparkSession, url: str) -> tuple[str | None, str]:
    """Return the S3 path for Spark, if Spark has an S3 file system that finds the location."""
    root = f"s3a{url.removeprefix('s3')}"
    jvm: Any = spark._jvm
    configuration: Any = getattr(spark, "_jsparkSession").sessionState().newHadoopConf()  # noqa: B009 - the type has no such attribute.
    try:
        jvm.java.lang.Class.forName("org.apache.hadoop.fs.s3a.S3AFileSystem")
    except Py4JError:
        return None, "Spark has no S3 file system"
    try:
        path = jvm.org.apache.hadoop.fs.Path(root)
        if path.getFileSystem(configuration).exists(path):
            return root, "Spark's S3 file system finds the location"
    except Py4JError as error:
        reason = str(error.args[0] if error.args else error).partition("\n")[0]
        return None, f"Spark's S3 file system failed: {reason}"
    return None, "Spark's S3 file system does not find the location"


def _check_shared(spark: SparkSession, url: str, folder: Path) -> None:
    """Check that every executor sees this folder, and not another one with the same name."""
    nonce = secrets.token_hex(16)
    mark = folder / f"tmp-reach-{nonce}"
    try:
        mark.write_text(nonce)
    except OSError as error:
        raise UsageError(
            f'location "{url}" cannot be checked for Spark\'s executors',
            detail=f"A file could not be made there: {error.strerror}.",
            hint="Reading a local folder on a cluster needs permission to write there.",
        ) from error
    try:
        hosts_without = sorted(
            {host for host, seen in _probe_results(spark, str(mark), nonce) if not seen}
        )
    finally:
        mark.unlink(missing_ok=True)
    if hosts_without:
        raise UsageError(
            f'location "{url}" is not the same folder on all of Spark\'s executors',
            detail=f"It is missing on {', '.join(hosts_without)}.",
            hint="Put it on a file system that all of them share, or on S3.",
        )


def _probe_results(spark: SparkSession, path: str, nonce: str) -> list[tuple[str, bool]]:
    """Return the host of each probe task, and whether the task reads the nonce."""

    def probe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import socket

        for batch in batches:
            try:
                seen = Path(path).read_text() == nonce
            except OSError:
                seen = False
            hosts, all_seen = [socket.gethostname()] * batch.num_rows, [seen] * batch.num_rows
            yield pa.record_batch([hosts, all_seen], names=["host", "seen"])

    results: list[Any] | None = None
    slots = PROBES
    if not connect(spark):
        slots = spark.sparkContext.defaultParallelism
        # A barrier starts all tasks at once, so every executor gets some. Dynamic allocation does
        # not support it; then only the present executors are checked.
        with suppress(PySparkException):
            results = _probes(spark, slots).mapInArrow(probe, PROBE_RESULT, barrier=True).collect()
    if results is None:
        results = _probes(spark, slots).mapInArrow(probe, PROBE_RESULT).collect()
    if len(results) != slots:
        raise TransientError(
            "Spark ended the check of a storage location early",
            detail=f"{len(results)} of {slots} tasks returned a result.",
            hint="Try again. See Spark's log for details.",
        )
    return [(row["host"], row["seen"]) for row in results]


def _probes(spark: SparkSession, slots: int) -> DataFrame:
    return spark.range(0, slots, 1, slots)


def _session_id(spark: SparkSession) -> str:
    if connect(spark):
        return str(getattr(spark, "session_id"))  # noqa: B009 - only the remote type has it.
    return str(spark.sparkContext.applicationId)
