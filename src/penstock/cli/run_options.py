"""Options and run of `up`, `ingest` and `materialize`."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO, TypeAlias

import typer

from penstock.cli.log_format import only_errors_if
from penstock.cli.options import AsJson, File
from penstock.cli.progress import ProgressPrinter
from penstock.cli.signals import stop_in_time, stop_on_signals

if TYPE_CHECKING:
    from penstock.catalog import Change, Type
    from penstock.errors import Fenced
    from penstock.supervisor import Supervisor

__all__ = ["print_change", "run_command"]

CommandFunction: TypeAlias = Callable[..., None]

Once = Annotated[
    bool,
    typer.Option(
        "--once",
        help="Exit when all data that was upstream at the start is delivered.",
    ),
]
For = Annotated[
    int | None,
    typer.Option(
        "--for",
        metavar="SECONDS",
        help="Exit this many seconds after the first row is delivered; by default do not exit.",
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Use this Spark master: local[*], spark://host:port. The default is "
        "PENSTOCK_MASTER, then this machine.",
    ),
]
Http = Annotated[
    str,
    typer.Option(
        metavar="ADDR",
        help="Serve the status page at this address; none serves no page. An address beyond this "
        "machine requires a token in PENSTOCK_HTTP_TOKEN.",
    ),
]
AllowDrop = Annotated[
    bool,
    typer.Option(
        "--allow-drop",
        help="Drop objects that FILE omits, and data that a backfill must drop or delete.",
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Replace a running process of this host with the same writer id. That process ends.",
    ),
]


def run_command(
    *types: "Type", http: str = "none"
) -> Callable[[Callable[[], None]], CommandFunction]:
    """Return a decorator that makes a command to run these types of objects of a file.

    The decorated function provides the name and the docstring. `http` is the default address of
    the status page.
    """
    default_address = http

    def command(
        file: File,
        once: Once = False,
        for_seconds: For = None,
        master: Master = None,
        http: Http = default_address,
        allow_drop: AllowDrop = False,
        take_over: TakeOver = False,
        as_json: AsJson = False,
    ) -> None:
        # Imported late: sources import a compiler, which is slow to load.
        from penstock.engine import check_not_running
        from penstock.engine import run as run_pipeline
        from penstock.pipeline import load
        from penstock.web import embedded_page

        stop = threading.Event()
        stop_on_signals(stop)
        printer = ProgressPrinter(stop, for_seconds, as_json=as_json)
        pipeline = load(file)
        # Before the status page: a running process uses its address.
        check_not_running(pipeline, types, take_over=take_over)
        started: list[Supervisor] = []

        def unfinished() -> list[str]:
            return [line for supervisor in started for line in supervisor.unfinished()]

        def print_url(url: str) -> None:
            if not as_json:
                sys.stderr.write(f"status page: {url}\n")

        def fenced() -> "Fenced | None":
            return next((error for supervisor in started if (error := supervisor.fenced())), None)

        with (
            stop_in_time(stop, unfinished, fenced),
            # The tasks of a fenced process fail for no other reason.
            only_errors_if(lambda: fenced() is not None),
            embedded_page(
                pipeline.location, http, served=print_url, await_address=take_over
            ) as page,
        ):

            def watch(supervisor: "Supervisor") -> None:
                started.append(supervisor)
                printer.start(supervisor)
                page.watch(supervisor)

            ran = run_pipeline(
                file,
                types=types,
                once=once,
                stop=stop,
                on_start=watch,
                on_changes=lambda changes: None if as_json else _print_changes(changes),
                master=master,
                spark_starts=lambda: None if as_json else _print_spark_start(),
                allow_drop=allow_drop,
                take_over=take_over,
            )
            if not ran and not as_json:
                sys.stderr.write("dropped; the file has no tasks to run\n")

    def decorate(function: Callable[[], None]) -> CommandFunction:
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def print_change(change: "Change", stream: TextIO) -> None:
    """Print a change on a line, with its detail and its hint indented below."""
    stream.write(f"{change}\n")
    for label, text in (("detail", change.detail), ("hint", change.hint)):
        if text:
            stream.write(f"  {label}: {text}\n".replace("\n", "\n  ", text.count("\n")))


def _print_changes(changes: "Sequence[Change]") -> None:
    for change in changes:
        print_change(change, sys.stderr)


def _print_spark_start() -> None:
    sys.stderr.write("starting Spark; this takes some seconds\n")
