"""`penstock demo`: a shop in a bundled Postgres, followed into SQLite, and compared at the end."""

import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.catalog.json_rows import encode_line
from penstock.cli.signals import stop_on_signals
from penstock.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.demo.comparison import Compared
    from penstock.demo.run import Up
    from penstock.pipeline.supervisor import Supervisor

__all__ = ["conclude", "demo"]


def demo(
    for_seconds: Annotated[
        float | None,
        typer.Option(
            "--for", metavar="SECONDS", min=0, help="End so long after the first row in SQLite."
        ),
    ] = None,
    http: Annotated[
        str,
        typer.Option(metavar="ADDR", help="Where the page is served, such as :8080, or none."),
    ] = "127.0.0.1:0",
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="An empty folder for all of it, which stays; a temporary one, unless said.",
        ),
    ] = None,
    kafka: Annotated[
        bool,
        typer.Option(
            "--kafka", help="Follow a topic of Kafka, too; its jars are fetched the first time."
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Let the temporary folder stay, too."),
    ] = False,
) -> None:
    """Follow a live shop into SQLite, and compare both when it ends, by Ctrl-C or --for.

    Exit status 0 only if source, collections and target are equal and there was something to
    compare. The last line is JSON.
    """
    began_ms = SYSTEM_CLOCK.boot_ms()
    stop = threading.Event()
    stop_on_signals(stop)
    _say("loading …")
    from penstock.demo.run import prepare, run

    own = folder or Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    remove = folder is None and not keep
    try:
        prepare(own)
        compared = run(
            own,
            up=_up(http),
            stop=stop,
            say=_say,
            for_seconds=for_seconds,
            kafka=kafka,
            began_ms=began_ms,
        )
        # Whoever wants to know why needs what is there.
        remove = remove and compared.equal
    finally:
        if remove:
            shutil.rmtree(own, ignore_errors=True)
        elif own.exists():
            _say(f"all of it is in {own}")
    raise typer.Exit(conclude(compared))


def conclude(compared: "Compared") -> int:
    """Say how it ended; the exit status."""
    for difference in compared.differences:
        _say(f"different: {difference}")
    if compared.trivial:
        _say(f"too little to tell: {compared.trivial}")
    failed = not compared.equal or bool(compared.trivial)
    if not failed:
        clicks = ""
        if compared.clicks is not None:
            clicks = (
                f"; and {compared.clicks:,} clicks in the topic, its collection and SQLite,"
                f" without {compared.aborted:,} that were aborted"
            )
        _say(
            f"equal: {compared.rows:,} rows in Postgres, collections and SQLite, "
            f"after {compared.updates:,} updates and {compared.deletes:,} deletes{clicks}"
        )
    _say(encode_line(dict(compared.told())))
    return int(failed)


def _up(http: str) -> "Up":
    """What runs the pipeline, and serves the page beside it."""
    from penstock.engine.up import run
    from penstock.pipeline import load
    from penstock.web.embedded import page_beside

    def up(
        file: Path,
        *,
        stop: threading.Event,
        told: "Callable[[Supervisor], None]",
        say: "Callable[[str], None]",
    ) -> None:
        with page_beside(load(file).location, http) as page:
            if page.url:
                say(f"the page is at {page.url}")

            def watch(running: "Supervisor") -> None:
                told(running)
                page.watch(running)

            starts = "Spark starts, which takes some seconds …"
            run(file, stop=stop, told=watch, spark_starts=lambda: say(starts))

    return up


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
