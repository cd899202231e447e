"""`penstock`: the command line and its exit statuses.

| Status | Meaning                                                                              |
|--------|--------------------------------------------------------------------------------------|
| 0      | success, also if the reader of the output ends, as in `penstock tail … | head`       |
| 1      | error; message, detail and hint are on standard error, without a traceback           |
| 2      | invalid command line                                                                 |
| 3      | another process has taken over                                                       |
"""

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.commands import LazyGroup
from penstock.cli.log_format import log_to_stderr
from penstock.cli.output import OutputFailed, discard_output, escape_controls, watch_output
from penstock.cli.signals import FENCED, exit_in_time
from penstock.errors import Fenced, PenstockError
from penstock.extras import missing_extra

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Replicate changing data from operational systems, exactly once.",
)


def _print_version(requested: bool) -> None:
    if requested:
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
        discard_output()
        if failed.is_broken_pipe:
            status = 0
        else:
            status = 1
            print("error: could not write to standard output", file=sys.stderr)
            print(f"detail: {failed}.", file=sys.stderr)
    exit_in_time(status if isinstance(status, int) else int(status is not None))
    sys.exit(status)


def _run() -> str | int | None:
    """Run the command and return its exit status."""
    try:
        log_to_stderr()
        app()
    except PenstockError as error:
        return _report(error)
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        return _report(extra)
    except SystemExit as end:
        return end.code
    return 0


def _report(error: PenstockError) -> int:
    """Print an error and return its exit status."""
    # In a pipe standard output is buffered: the error follows the output that it refers to.
    try:
        sys.stdout.flush()
    finally:
        lines = "\n".join([f"error: {error}", *getattr(error, "__notes__", [])])
        print(escape_controls(lines), file=sys.stderr)
    return FENCED if isinstance(error, Fenced) else 1


if __name__ == "__main__":
    main()
