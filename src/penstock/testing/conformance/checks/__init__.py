"""The checks, in the order they are made: from the first question to broken messages."""

from penstock.testing.conformance.checks import (  # noqa: I001  (the order they are made in)
    spec,
    validate,
    apply,
    order,
    loads,
    stores,
    values,
    delta,
    cancellation,
    fences,
    zombies,
    restarts,
    malformed,
)

__all__ = [
    "apply",
    "cancellation",
    "delta",
    "fences",
    "loads",
    "malformed",
    "order",
    "restarts",
    "spec",
    "stores",
    "validate",
    "values",
    "zombies",
]
