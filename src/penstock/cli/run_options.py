"""What `up`, `ingest` and `materialize` have in common: their options, and how they run."""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO, TypeAlias

import typer

from penstock.cli.log_format import only_errors_if
from penstock.cli.options import AsJson, File
from penstock.cli.progress import Teller
from penstock.cli.signals import stop_in_time, stop_on_signals

if TYPE_CHECKING:
    from penstock.catalog.diff import Change
    from penstock.catalog.objects import Type
    from penstock.errors import Fenced
    from penstock.pipeline.supervisor import Supervisor

__all__ = ["follows", "print_change"]

Verb: TypeAlias = Callable[..., None]

Once = Annotated[
    bool,
    typer.Option(
        "--once", help="End when all that was upstream at the start has come as far as FILE says."
    ),
]
For = Annotated[
    int | None,
    typer.Option("--for", metavar="SECONDS", help="End so long after the first row."),
]
Master = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where Spark runs: local[*], spark://host:port."),
]
Http = Annotated[
    str,
    typer.Option(
        metavar="ADDR",
        help="Where the page is served: 127.0.0.1:8080; or none. Beyond this machine it asks for "
        "the token in PENSTOCK_HTTP_TOKEN.",
    ),
]
AllowDrop = Annotated[
    bool,
    typer.Option(
        "--allow-drop", help="Drop what FILE leaves out, and what a backfill must drop or remove."
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Replace a running process of this host that has the same writer id. It ends.",
    ),
]


def follows(*types: "Type", http: str = "none") -> Callable[[Callable[[], None]], Verb]:
    """Make a verb of a function, which follows what a file says of these types of objects.

    The function gives its name and its docstring. `http` is where the page is served
    unless the option says it.
    """
    page_at = http

    def verb(
        file: File,
        once: Once = False,
        for_seconds: For = None,
        master: Master = None,
        http: Http = page_at,
        allow_drop: AllowDrop = False,
        take_over: TakeOver = False,
        as_json: AsJson = False,
    ) -> None:
        # Sources bring a compiler along, which no other verb should wait for.
        from penstock.engine import up
        from penstock.pipeline import load
        from penstock.web.embedded import page_beside

        stop = threading.Event()
        stop_on_signals(stop)
        teller = Teller(stop, for_seconds, as_json=as_json)
        pipeline = load(file)
        # Before the page: the process that runs has its address.
        up.check_not_running(pipeline, types, take_over=take_over)
        started: list[Supervisor] = []

        def unfinished() -> list[str]:
            return [line for running in started for line in running.unfinished()]

        def served(url: str) -> None:
            if not as_json:
                sys.stderr.write(f"the page is at {url}\n")

        def fenced() -> "Fenced | None":
            return next((error for running in started if (error := running.fenced())), None)

        with (
            stop_in_time(stop, unfinished, fenced),
            # The tasks of a fenced process fail for no other reason.
            only_errors_if(lambda: fenced() is not None),
            page_beside(pipeline.location, http, served=served, await_address=take_over) as page,
        ):

            def told(running: "Supervisor") -> None:
                started.append(running)
                teller.start(running)
                page.watch(running)

            ran = up.run(
                file,
                types=types,
                once=once,
                stop=stop,
                told=told,
                changes=lambda found: None if as_json else _tell_changes(found),
                master=master,
                spark_starts=lambda: None if as_json else _tell_spark(),
                allow_drop=allow_drop,
                take_over=take_over,
            )
            if not ran and not as_json:
                sys.stderr.write("that is dropped, and the file has nothing to run\n")

    def named(function: Callable[[], None]) -> Verb:
        verb.__name__, verb.__doc__ = function.__name__, function.__doc__
        return verb

    return named


def print_change(change: "Change", stream: TextIO) -> None:
    """Print a change on a line, with its detail and its hint indented below."""
    stream.write(f"{change}\n")
    for label, text in (("detail", change.detail), ("hint", change.hint)):
        if text:
            stream.write(f"  {label}: {text}\n".replace("\n", "\n  ", text.count("\n")))


def _tell_changes(found: "Sequence[Change]") -> None:
    for change in found:
        print_change(change, sys.stderr)


def _tell_spark() -> None:
    sys.stderr.write("Spark starts; this takes some seconds\n")
