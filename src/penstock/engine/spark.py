"""Spark entry module of the engine: the only place that finds or starts the session.

A session that already runs belongs to the code that started it. It is used as it is, and none of
its settings changes. Otherwise a session is started, and each setting has the value of the first of
these places that sets it:

    arguments               master, config
    PENSTOCK_MASTER         the master alone
    Spark's configuration   spark-defaults.conf, spark-submit
    our defaults            local[*], quiet, bound to loopback, jobs share the cores

Only jars are combined: the jars of the caller are added to the jars of Spark's configuration.

The defaults depend on Spark's configuration. The JVM is therefore started first, then its
configuration is read, and then the session is started.
"""

import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext, __version__, accumulators
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.engine.java import find_java, launcher_home
from penstock.errors import UsageError
from penstock.telemetry import fields, logger

__all__ = ["connect", "forget_dead_session", "local", "session"]

log = logger("engine")

LOOPBACK: Final = "127.0.0.1"

CONNECT_PORT: Final = 15002
"""Default port of a Spark Connect server."""

JARS: Final = "spark.jars"

NEWEST_JAVA: Final = 23 if __version__.startswith("4.1.") else None
"""Newest supported Java: Hadoop in PySpark 4.1 calls methods that Java 24 removed; 4.2 does not."""

_HERE: Final = Path(__file__).parent

_starting: Final = threading.Lock()


def session(
    *,
    master: str | None = None,
    app_name: str = "penstock",
    config: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> SparkSession:
    """Return the running session, or start one.

    Raises:
        UsageError: Spark runs with another master than `master`, or cannot start.
    """
    with _starting:
        try:
            running = _running()
        except (Py4JError, OSError) as error:
            raise UsageError(
                "running Spark session does not respond",
                detail=_reason(error),
                hint="Its JVM may have ended. Start this process again.",
            ) from error
        if running is not None:
            _check_master(running, master)
            _log_unused(running, config or {})
            return running
        return _start(master, app_name, dict(config or {}), clock)


def forget_dead_session() -> bool:
    """Discard a session whose JVM has ended; return whether there was one.

    Another session can be started afterwards. Code that still holds the old session gets errors.
    """
    with _starting:
        gateway: Any = SparkContext._gateway
        launched = None if gateway is None else getattr(gateway, "proc", None)
        if launched is None or launched.poll() is None:
            return False
        context: Any = SparkContext._active_spark_context
        if context is not None:
            context._jsc = None  # The JVM cannot be notified; only the Python side stops.
            context.stop()
        with SparkContext._lock:
            SparkContext._gateway = SparkContext._jvm = None
        SparkSession._instantiatedSession = None
        log.warning("JVM of Spark ended", extra=fields(status=launched.returncode))
        return True


def local(spark: SparkSession) -> bool:
    """Return whether tasks run in the process of the driver, and see its files.

    False for `local-cluster`, whose executors are other processes, and for Spark Connect, whose
    server may run on any host.
    """
    return not connect(spark) and _local(str(spark.sparkContext.master))


def connect(spark: SparkSession) -> bool:
    """Return whether a session uses Spark Connect: a client without JVM and SparkContext."""
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def _running() -> SparkSession | None:
    # SUBTLE: looked up in `sys.modules`, because an import needs grpc and pandas.
    if remote := sys.modules.get("pyspark.sql.connect.session"):
        default = getattr(remote.SparkSession, "_default_session", None)
        connected: SparkSession | None = remote.SparkSession.getActiveSession()
        if connected is None and default is not None and not default.is_stopped:
            connected = default
        if connected is not None:
            return connected
    context = SparkContext._active_spark_context
    if context is None or getattr(context, "_jsc", None) is None:
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def _check_master(running: SparkSession, requested: str | None) -> None:
    if requested is None:
        return
    master = _endpoint(running) if connect(running) else running.sparkContext.master
    if master != (_normal(requested) if requested.startswith("sc://") else requested):
        raise UsageError(
            f'Spark already runs with master "{master}", not "{_plain(requested)}"',
            detail="A process has one Spark session, and its master cannot be changed.",
            hint="Give no master to use the running session, or stop that session first.",
        )


def _log_unused(running: SparkSession, config: Mapping[str, str]) -> None:
    differing = [name for name in sorted(config) if running.conf.get(name, None) != config[name]]
    if differing:
        log.warning(
            "settings are not applied to a running Spark session",
            extra=fields(settings=",".join(differing)),
        )


def _start(master: str | None, app_name: str, config: dict[str, str], clock: Clock) -> SparkSession:
    began_ms = clock.boot_ms()
    asked = master or config.get("spark.master") or os.environ.get("PENSTOCK_MASTER") or None
    remote = asked if asked and asked.startswith("sc://") else None
    if asked is None:
        remote = config.get("spark.remote") or os.environ.get("SPARK_REMOTE") or None
    if remote is not None:
        spark = _start_remote(remote, config)
        _log_ready(spark, _endpoint(spark), clock.boot_ms() - began_ms)
        return spark
    if asked is not None:
        _check_form(asked)
        config["spark.master"] = asked
    config.setdefault("spark.app.name", app_name)
    if JARS in config:
        config[JARS] = _both(config[JARS], _configured_jars())
    launched = _start_jvm(config)
    with _mapped_start_errors(config.get("spark.master")):
        # With a running JVM, this is the configuration of spark-defaults.conf and spark-submit.
        found = {k: v for k, v in SparkConf().getAll() if k not in _SUBMITTED}
        if launched:
            # SUBTLE: spark-submit adds to `config`: it resolves jars, for example. Its additions
            # must not stay in the JVM, which may outlive this session.
            decided = {**config, **found}
            _forget(config)
        else:
            decided = {**found, **config}
            if JARS in config:
                decided[JARS] = _both(config[JARS], found.get(JARS, ""))
        runs_on = decided.setdefault("spark.master", "local[*]")
        settings: dict[str, Any] = {**_ours(runs_on), **decided}
        if "spark.sql.warehouse.dir" not in settings:
            settings["spark.sql.warehouse.dir"] = _scratch("penstock-warehouse-")
        with _environment(PYSPARK_PYTHON=_worker_python(settings)):
            spark = SparkSession.builder.config(map=settings).getOrCreate()
    _log_ready(spark, _plain(runs_on), clock.boot_ms() - began_ms)
    return spark


def _start_remote(url: str, config: Mapping[str, str]) -> SparkSession:
    log.info("connecting to Spark", extra=fields(server=_normal(url)))
    others: dict[str, Any] = dict(config)
    # The jars of a server are fixed at its start.
    for name in ("spark.master", "spark.remote", JARS):
        others.pop(name, None)
    try:
        with _mapped_start_errors(url):
            return SparkSession.builder.config(map=others).remote(url).getOrCreate()
    except ImportError as error:
        raise UsageError(
            f'Spark Connect server "{_normal(url)}" cannot be used',
            detail=f"{error}.",
            hint="Install the dependencies of Spark Connect: `pip install pyspark[connect]`.",
        ) from error


def _start_jvm(config: Mapping[str, str]) -> bool:
    """Start the JVM; return False if one runs, from a stopped session or from spark-submit."""
    asked = config.get("spark.master")
    shown = _plain(asked) if asked else "default"
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        log.info("starting Spark", extra=fields(master=shown, java="running"))
        with _mapped_start_errors(asked):
            SparkContext._ensure_initialized()
        return False
    java = find_java(newest=NEWEST_JAVA)
    log.info(
        "starting Spark",
        extra=fields(master=shown, java=java.version, program=java.program),
    )
    launch = SparkConf(loadDefaults=False)
    for name, value in config.items():
        launch.set(name, value)
    # The JVM plans Python data sources in Python processes on the host of the driver.
    changed = {
        "JAVA_HOME": str(launcher_home(java)),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if not _has_own_logging(config, options):
        file = (_HERE / "log4j2.properties").as_uri()
        changed["SPARK_SUBMIT_OPTS"] = f"{options} -Dlog4j2.configurationFile={file}".strip()
    with _mapped_start_errors(asked), _environment(**changed):
        SparkContext._ensure_initialized(conf=launch)
    return True


def _forget(config: Mapping[str, str]) -> None:
    """Clear the start properties of the JVM, which the next session would otherwise inherit."""
    jvm: Any = SparkContext._jvm
    for name in config:
        jvm.java.lang.System.clearProperty(name)


def _ours(master: str) -> dict[str, str]:
    """Return our defaults for settings that no other place sets."""
    settings = {
        "spark.api.mode": "classic",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.scheduler.mode": "FAIR",
        # Shards that wait for a returning executor are checked every second.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if not (_configuration_folder() / "fairscheduler.xml").exists():
        # Without an allocation file, FAIR applies only between pools, and all jobs are in one pool.
        settings["spark.scheduler.allocation.file"] = (_HERE / "fairscheduler.xml").as_uri()
    if master.startswith("local"):
        settings["spark.driver.bindAddress"] = LOOPBACK
        settings["spark.driver.host"] = LOOPBACK
    return settings


_SUBMITTED: Final = frozenset({"spark.app.name", "spark.ui.showConsoleProgress"})
"""Settings that spark-submit itself sets, which are therefore not a choice of the user."""


def _worker_python(settings: Mapping[str, str]) -> str:
    """Return the interpreter of tasks: by default the current one, which has our packages.

    On a cluster the interpreter may have another path, which PYSPARK_PYTHON can give.
    """
    chosen = settings.get("spark.pyspark.python")
    if chosen is None and not settings["spark.master"].startswith("local"):
        chosen = os.environ.get("PYSPARK_PYTHON")
    return chosen or sys.executable


def _check_form(master: str) -> None:
    # spark-submit also rejects it, but exits and prints the reason to standard error only.
    if not _MASTER.fullmatch(master):
        raise UsageError(
            f'Spark master "{_plain(master)}" does not exist',
            detail="A master is local[n], local[*], local-cluster[n,cores,MiB], spark://host:port, "
            "yarn, k8s://url, or sc://host:port for a Spark Connect server.",
            hint="Omit the master to run on this machine, with all its cores.",
        )


_MASTER: Final = re.compile(
    r"local|local\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\]"
    r"|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]"
    r"|spark://.+|k8s://.+|yarn"
)


def _local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _normal(url: str) -> str:
    """Return a Connect URL with its port and without secrets."""
    plain = _plain(url)
    parts = urlsplit(plain)
    try:
        return f"sc://{parts.hostname or ''}:{parts.port or CONNECT_PORT}"
    except ValueError:
        return plain  # Spark reports the error in the port.


def _plain(master: str) -> str:
    """Return a master without its possible secrets: parameters and login."""
    return re.sub(r"//[^/]*@", "//", master.partition(";")[0])


def _secrets(master: str) -> list[str]:
    """Return the text that `_plain` removes, in every form that an error may contain."""
    given = [each for each in master.split(";")[1:] if each]
    values = [each.partition("=")[2] for each in given]
    logins = re.findall(r"//([^/]*)@", master)
    return [*given, *logins, *filter(None, values), *filter(None, map(unquote, values))]


def _endpoint(spark: SparkSession) -> str:
    remote: Any = spark
    return f"sc://{remote.client._builder.endpoint}"


def _configuration_folder() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    named = os.environ.get("SPARK_CONF_DIR")
    return Path(named) if named else Path(_find_spark_home()) / "conf"


def _configured_jars() -> str:
    """Return the jars of spark-defaults.conf, which `config` would replace."""
    try:
        text = (_configuration_folder() / "spark-defaults.conf").read_text()
    except OSError:
        return ""
    named = re.findall(r"^\s*spark\.jars(?:\s*[=:]\s*|\s+)(\S.*?)\s*$", text, re.MULTILINE)
    return str(named[-1]) if named else ""


def _both(*lists: str) -> str:
    """Join comma-separated lists, with each member once."""
    members = [each.strip() for some in lists for each in some.split(",")]
    return ",".join(dict.fromkeys(filter(None, members)))


def _has_own_logging(config: Mapping[str, str], options: str) -> bool:
    texts = (options, config.get("spark.driver.extraJavaOptions", ""))
    return any("configurationFile" in text for text in texts) or any(
        _configuration_folder().glob("log4j2*")
    )


def _scratch(prefix: str) -> str:
    """Create a private folder that the JVM removes at its end, even if this process is killed."""
    folder = tempfile.mkdtemp(prefix=prefix)
    jvm: Any = SparkContext._jvm
    jvm.org.apache.spark.util.ShutdownHookManager.registerShutdownDeleteDir(
        jvm.java.io.File(folder)
    )
    return folder


def _log_accumulator_error(_server: object, _request: object, _client: object) -> None:
    log.debug("connection for accumulators failed", extra=fields(error=str(sys.exception())))


# The caller that uses a dead JVM reports it. The PySpark thread would also print a traceback.
accumulators.AccumulatorTCPServer.handle_error = _log_accumulator_error  # type: ignore[method-assign, assignment]
accumulators.AccumulatorUnixServer.handle_error = _log_accumulator_error  # type: ignore[method-assign, assignment]


def _log_ready(spark: SparkSession, master: str, took_ms: int) -> None:
    log.info("Spark is ready", extra=fields(version=spark.version, master=master, took_ms=took_ms))


@contextmanager
def _mapped_start_errors(master: str | None) -> Iterator[None]:
    """Convert errors of Spark's start to our error with the reason."""
    try:
        yield
    except (Py4JError, PySparkException, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ImportError):
            raise
        died = "JAVA_GATEWAY_EXITED" in str(error)
        secrets = _secrets(master or "")
        leaks = any(secret in str(error) for secret in secrets)
        reason = _reason(error)
        for secret in secrets:
            reason = reason.replace(secret, "…")
        raise UsageError(
            f'Spark could not start with master "{_plain(master)}"'
            if master
            else "Spark could not start",
            detail="Its JVM ended before it was ready. See its output for the reason."
            if died
            else reason,
            hint="Check the master and Spark's settings.",
        ) from (None if leaks else error)


def _reason(error: Exception) -> str:
    """Return the first line of the error message, as a sentence."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        thrown: Any = getattr(error, "java_exception")  # noqa: B009 - py4j has no types.
        text = str(thrown.getMessage() or thrown.toString())
    first = text.strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return f"{first}."


@contextmanager
def _environment(**changed: str) -> Iterator[None]:
    """Change the environment inside the block only: the JVM inherits the changes."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
