"""`penstock`: the verbs, and how they end.

Exit status 0 only on success. An error is told as a person needs it (what
happened, what is known, what to do) on standard error, without a traceback;
exit status 1, or 3 if another process has taken its place. A call that cannot
be understood exits with 2. Whoever reads the
output may go away, as in `penstock tail … | head`: that is success.
"""

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.compact import compact
from penstock.cli.connector import connector
from penstock.cli.demo import demo
from penstock.cli.drop import drop
from penstock.cli.ingest import ingest
from penstock.cli.init import init
from penstock.cli.log_format import log_to_stderr
from penstock.cli.materialize import materialize
from penstock.cli.options import Command, CommandGroup
from penstock.cli.output import OutputFailed, give_up_output, watch_output
from penstock.cli.pause import pause, resume
from penstock.cli.plan import plan
from penstock.cli.read import read
from penstock.cli.release import release
from penstock.cli.resync import resync
from penstock.cli.schema import schema
from penstock.cli.signals import FENCED, exit_in_time
from penstock.cli.status import status
from penstock.cli.tail import tail
from penstock.cli.up import up
from penstock.cli.verify import verify
from penstock.errors import Fenced, PenstockError

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves changing data from where it is made to where it is used, exactly once.",
)
for verb in (
    *(demo, init, schema, plan),
    *(up, ingest, materialize),
    *(status, read, tail),
    *(pause, resume, resync, drop),
    *(compact, verify, release),
):
    app.command(cls=Command)(verb)
app.add_typer(connector)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    watch_output()
    try:
        status = _run()
        sys.stdout.flush()
    except OutputFailed as failed:
        give_up_output()
        if failed.reader_gone:
            status = 0
        else:
            status = 1
            print("error: could not write to standard output", file=sys.stderr)
            print(f"detail: The system says: {failed}.", file=sys.stderr)
    exit_in_time(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


def _run() -> str | int | None:
    """The exit status of the verb."""
    try:
        log_to_stderr()
        app()
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(note, file=sys.stderr)
        return FENCED if isinstance(error, Fenced) else 1
    except SystemExit as end:
        return end.code
    return 0


if __name__ == "__main__":
    main()
