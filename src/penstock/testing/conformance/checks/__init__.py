"""Checks in the order of execution, from Spec to malformed messages."""

from penstock.testing.conformance.checks import (  # noqa: I001  (the order they are made in)
    spec,
    validate,
    apply,
    message_order,
    loads,
    stores,
    values,
    delta_updates,
    cancellation,
    fences,
    zombies,
    restarts,
    malformed_messages,
)

__all__ = [
    "apply",
    "cancellation",
    "delta_updates",
    "fences",
    "loads",
    "malformed_messages",
    "message_order",
    "restarts",
    "spec",
    "stores",
    "validate",
    "values",
    "zombies",
]
