"""`penstock connector`: built-in connectors, and the conformance suite for everybody's.

What a verb needs is imported when it runs: gRPC and compiled code take a second, which
no other verb should wait for.
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

from penstock.catalog.json_rows import encode_line
from penstock.cli.options import AsJson, Command, CommandGroup
from penstock.cli.signals import stop_on_signals
from penstock.errors import UsageError
from penstock.protocol.transport_security import Security

__all__ = ["connector"]

connector = typer.Typer(
    cls=CommandGroup,
    name="connector",
    no_args_is_help=True,
    help="Built-in connectors, and the conformance suite for any connector.",
)

Ca = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="Whose certificates are believed; turns TLS on."),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="Our own certificate; turns TLS on."),
]
Key = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of our certificate.")
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="FILE", help="A file with the bearer token that callers must show."
    ),
]
Plaintext = Annotated[
    bool,
    typer.Option("--plaintext", help="Go without TLS, even beyond this machine."),
]


@connector.command("list", cls=Command)
def list_connectors(as_json: AsJson = False) -> None:
    """List the built-in connectors."""
    from penstock.connectors import BUILT_IN, built_in

    for name in sorted(BUILT_IN):
        summary = (type(built_in(name)).__doc__ or "").splitlines()[0]
        print(encode_line({"name": name, "does": summary}) if as_json else f"{name:14} {summary}")


@connector.command(cls=Command)
def spec(
    name: Annotated[
        str, typer.Argument(metavar="NAME or ADDR", help="A built-in one, or an address.")
    ],
    as_json: AsJson = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = None,
    plaintext: Plaintext = False,
) -> None:
    """Print what can be configured: JSON schemas of endpoint and resource."""
    from penstock.connectors import BUILT_IN, built_in
    from penstock.materialize import connect
    from penstock.sdk.config import json_schema

    if name in BUILT_IN:
        found = built_in(name)
        endpoint, resource = json_schema(found.endpoint), json_schema(found.resource)
        url = found.documentation_url
    elif ":" in name:
        with connect(name, _security(ca, certificate, key, token, plaintext)) as connection:
            answer = connection.spec()
        endpoint, resource = answer.endpoint_spec_schema_json, answer.resource_spec_schema_json
        url = answer.documentation_url
    else:
        built_in(name)  # Says which there are.
        raise AssertionError
    told: dict[str, Any] = {
        "endpoint": json.loads(endpoint),
        "resource": json.loads(resource),
        "documentation": url,
    }
    print(encode_line(told) if as_json else json.dumps(told, indent=2, ensure_ascii=False))


@connector.command(cls=Command)
def serve(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `penstock connector list`.")],
    listen: Annotated[
        str,
        typer.Option(metavar="ADDR", help="host:port, port 0 for a free one; or unix:PATH."),
    ],
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    token: Token = None,
    plaintext: Plaintext = False,
    until_stdin_ends: Annotated[
        bool,
        typer.Option(
            "--until-stdin-ends", help="End with standard input, as when whoever writes it dies."
        ),
    ] = False,
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Load compiled code at once, not with the first documents."),
    ] = False,
) -> None:
    """Serve a built-in connector, until it is told to end.

    Beyond this machine TLS is needed, or --plaintext. With --tls-ca, callers must show a
    certificate as well.
    """
    from penstock.connectors import built_in
    from penstock.sdk import serve as serve_connector
    from penstock.sdk.warmup import warm as load_compiled

    stop = threading.Event()
    stop_on_signals(stop)
    if until_stdin_ends:
        threading.Thread(target=_wait_for_the_end, args=(stop,), daemon=True).start()
    security = _security(ca, certificate, key, token, plaintext)
    with serve_connector(built_in(name), listen, security) as server:
        print(f"connector {name} listens on {server.address}", flush=True)
        if warm:
            threading.Thread(target=load_compiled, name="warm", daemon=True).start()
        server.wait(stop)


@connector.command(cls=Command)
def check(
    address: Annotated[
        str | None,
        typer.Argument(metavar="ADDR", help="Where it listens; none, if FILE has a command."),
    ] = None,
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Endpoint, resource template, pattern, …")
    ] = ...,  # type: ignore[assignment]
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Just this check; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the conformance suite against a connector, whoever wrote it.

    Exit status 1 if a check fails. What could not be tested is listed as skipped.
    """
    from penstock.testing import conformance

    with _breaking_off():
        report = conformance.run(conformance.load(config), address, only=only or ())
    print(report.as_json() if as_json else report.as_table())
    if report.failed:
        raise typer.Exit(1)


def _wait_for_the_end(stop: threading.Event) -> None:
    """Set `stop` when standard input ends, or was never there."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    stop.set()


@contextmanager
def _breaking_off() -> Iterator[None]:
    """Meanwhile, signals that would end the process break off; those that it ignores do not."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    deadly = (signal.SIG_DFL, signal.default_int_handler)
    before = {each: signal.getsignal(each) for each in signals}
    ours = [each for each in signals if before[each] in deadly]
    for each in ours:
        signal.signal(each, _break_off)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, before[each])


def _break_off(number: int, _frame: object) -> None:
    """End as by an error, so that what was started is ended, too."""
    raise SystemExit(128 + number)


def _security(
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    token: Path | None,
    plaintext: bool,
) -> Security:
    shown = ""
    if token is not None:
        try:
            shown = token.read_text().strip()
        except OSError as error:
            raise UsageError(
                f'token file "{token}" cannot be read', detail=f"{error.strerror}."
            ) from error
        if not shown:
            raise UsageError(f'token file "{token}" is empty')
    return Security(ca, certificate, key, shown, plaintext)
