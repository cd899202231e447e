"""`penstock connector`: built-in connectors, and the conformance suite for any connector.

Each command imports its dependencies when it runs: gRPC and compiled code take a second to load.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.catalog import encode_line
from penstock.cli.commands import Command, CommandGroup
from penstock.cli.options import AsJson
from penstock.cli.signals import stop_on_signals
from penstock.errors import UsageError
from penstock.protocol.transport_security import Security

__all__ = ["app", "connector"]

app = typer.Typer(
    cls=CommandGroup,
    name="connector",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Ca = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="Verify the peer with this CA file. Enables TLS."
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="Present this certificate. Enables TLS."),
]
Key = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Private key of the certificate.")
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="File with the bearer token to require or to send."
    ),
]
Plaintext = Annotated[
    bool,
    typer.Option("--plaintext", help="Allow connections without TLS beyond this machine."),
]


@app.callback()
def connector() -> None:
    """List, serve and check connectors."""


@app.command("list", cls=Command)
def list_connectors(as_json: AsJson = False) -> None:
    """List the built-in connectors."""
    from penstock.connectors import BUILT_IN, built_in

    for name in sorted(BUILT_IN):
        summary = (type(built_in(name)).__doc__ or "").splitlines()[0]
        print(encode_line({"name": name, "does": summary}) if as_json else f"{name:14} {summary}")


@app.command(cls=Command)
def spec(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME or ADDR", help="Name of a built-in connector, or an address."),
    ],
    as_json: AsJson = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = None,
    plaintext: Plaintext = False,
) -> None:
    """Print the configuration of a connector: JSON schemas of endpoint and resource."""
    from penstock.connectors import BUILT_IN, built_in
    from penstock.materialize import connect
    from penstock.sdk.config import json_schema

    if name in BUILT_IN:
        definition = built_in(name)
        endpoint, resource = json_schema(definition.endpoint), json_schema(definition.resource)
        url = definition.documentation_url
    elif ":" in name:
        with connect(name, _security(ca, certificate, key, token, plaintext)) as connection:
            response = connection.spec()
        endpoint, resource = response.endpoint_spec_schema_json, response.resource_spec_schema_json
        url = response.documentation_url
    else:
        built_in(name)  # Raises an error that lists the names.
        raise AssertionError
    schemas: dict[str, Any] = {
        "endpoint": json.loads(endpoint),
        "resource": json.loads(resource),
        "documentation": url,
    }
    print(encode_line(schemas) if as_json else json.dumps(schemas, indent=2, ensure_ascii=False))


@app.command(cls=Command)
def serve(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `penstock connector list` prints.")
    ],
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDR",
            help="Listen on host:port, where port 0 selects a free one, or on unix:PATH.",
        ),
    ],
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = None,
    plaintext: Plaintext = False,
    until_stdin_ends: Annotated[
        bool,
        typer.Option(
            "--until-stdin-ends",
            help="Also end at the end of standard input, for example when the parent dies.",
        ),
    ] = False,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Load compiled code at the start, not with the first documents."
        ),
    ] = False,
) -> None:
    """Serve a built-in connector until SIGINT or SIGTERM.

    An address beyond this machine requires TLS, or --plaintext. With --tls-ca, clients must present
    a certificate.
    """
    from penstock.connectors import built_in
    from penstock.sdk import serve as serve_connector
    from penstock.sdk.warmup import warm as load_compiled

    stop = threading.Event()
    stop_on_signals(stop)
    if until_stdin_ends:
        threading.Thread(target=_stop_at_stdin_end, args=(stop,), daemon=True).start()
    security = _security(ca, certificate, key, token, plaintext)
    with serve_connector(built_in(name), listen, security) as server:
        print(f"connector {name} listens on {server.address}", flush=True)
        if warm:
            threading.Thread(target=load_compiled, name="warm", daemon=True).start()
        server.wait(stop)


@app.command(cls=Command)
def check(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDR", help="Address of the connector, unless FILE has a command."),
    ] = None,
    config: Annotated[
        Path,
        typer.Option(metavar="FILE", help="YAML file with endpoint, resource template, pattern, …"),
    ] = ...,  # type: ignore[assignment]
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK", help="Run only this check. Repeatable; by default all checks run."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the conformance suite against a connector.

    The exit status is 1 if a check fails. Checks that could not run are listed as skipped.
    """
    from penstock.testing import conformance

    with _ended_by_signals():
        report = conformance.run(conformance.load(config), address, only=only or ())
    print(report.as_json() if as_json else report.as_table())
    if report.failed:
        raise typer.Exit(1)


def _stop_at_stdin_end(stop: threading.Event) -> None:
    """Set `stop` when standard input ends or is closed."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    stop.set()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise SystemExit at signals that would end the process; ignored signals stay ignored.

    The exception ends the processes that the block has started.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    fatal = (signal.SIG_DFL, signal.default_int_handler)
    handlers = {number: signal.getsignal(number) for number in signals}
    changed = [number for number in signals if handlers[number] in fatal]
    for number in changed:
        signal.signal(number, _exit_at_signal)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, handlers[number])


def _exit_at_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _security(
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    token: Path | None,
    plaintext: bool,
) -> Security:
    bearer_token = ""
    if token is not None:
        try:
            bearer_token = token.read_text().strip()
        except OSError as error:
            raise UsageError(
                f'could not read token file "{token}"', detail=f"{error.strerror}."
            ) from error
        if not bearer_token:
            raise UsageError(f'token file "{token}" is empty')
    return Security(ca, certificate, key, bearer_token, plaintext)
