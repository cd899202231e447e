"""Execution of the checks in sequence, each with its own resources."""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import penstock.testing.conformance.checks  # noqa: F401  (registers them)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError, UsageError
from penstock.protocol.messages import ValidateBinding
from penstock.testing.conformance.check import CHECKS, Check, Failed, Skipped, skip_reason
from penstock.testing.conformance.config import Config, Pattern
from penstock.testing.conformance.documents import PLAIN
from penstock.testing.conformance.peer import Peer
from penstock.testing.conformance.process import Connectors
from penstock.testing.conformance.redaction import hider
from penstock.testing.conformance.report import Outcome, Report, Result

__all__ = ["run"]

MAX_MESSAGES: Final = 12
"""Number of messages shown for a failure."""


def run(
    config: Config,
    address: str | None = None,
    only: Sequence[str] = (),
    on_result: Callable[[Result], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Report:
    """Run every check, or `only` the named ones, on the connector at `address`.

    With `command` in the configuration, the suite starts the connector, at `address` if given, and
    ends it afterwards.

    Raises:
        UsageError: a check of this name, or the connector, does not exist.
        ConnectorError: no connector answers at the address.
    """
    checks = _select(only)
    prefix = f"check_{secrets.token_hex(3)}"
    results = []
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        connectors = Connectors(config, address, Path(folder), clock)
        try:
            connectors.hide = hider(config, connectors.connection().spec())
            loads = _loads(Peer(connectors, prefix))
            for number, check in enumerate(checks):
                result = _run_check(check, connectors, f"{prefix}_{number}", clock, loads=loads)
                results.append(result)
                if on_result is not None:
                    on_result(result)
        finally:
            connectors.close()
    return Report(tuple(results))


def _select(only: Sequence[str]) -> Sequence[Check]:
    for name in only:
        if name not in CHECKS:
            raise UsageError(
                f'check "{name}" does not exist', hint=f"The checks are {', '.join(CHECKS)}."
            )
    return [check for name, check in CHECKS.items() if not only or name in only]


def _loads(peer: Peer) -> bool:
    """Return whether the bindings of the connector support Load."""
    name = peer.new_name()
    try:
        response = peer.validate(
            [ValidateBinding(peer.resource_json(name), PLAIN.collection(name))]
        )
    except PenstockError:
        return peer.config.pattern is not Pattern.PUSH_ONLY  # Another check reports the error.
    return not any(binding.delta_updates for binding in response.bindings)


def _run_check(
    check: Check, connectors: Connectors, prefix: str, clock: Clock, *, loads: bool
) -> Result:
    if reason := skip_reason(check, connectors.config, loads=loads):
        return Result(check, Outcome.SKIPPED, reason)
    start_ms = clock.boot_ms()
    before = connectors.printed()
    peer = Peer(connectors, prefix)
    outcome, reason = Outcome.PASSED, ""
    try:
        check.body(peer)
    except Skipped as skipped:
        outcome, reason = Outcome.SKIPPED, str(skipped)
    except Exception as error:  # noqa: BLE001 - the other checks run after any error
        outcome, reason = Outcome.FAILED, _describe(error)
    failed = outcome is Outcome.FAILED
    messages = peer.messages[-MAX_MESSAGES:] if failed else []
    printed = connectors.last_lines(before) if failed else []
    peer.close()
    hide = connectors.hide
    return Result(
        check,
        outcome,
        hide(reason),
        tuple(map(hide, messages)),
        tuple(printed),
        tuple(map(hide, peer.notes)),
        clock.boot_ms() - start_ms,
    )


def _describe(error: Exception) -> str:
    if not isinstance(error, PenstockError):
        return f"the connector failed: {type(error).__name__}: {error}"
    message = str(error) if isinstance(error, Failed) else f"the connector failed: {error}"
    return "\n".join(part for part in (message, error.detail, error.hint) if part)
