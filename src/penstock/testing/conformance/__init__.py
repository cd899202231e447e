"""Conformance suite of the materialization protocol, for connectors in any language.

    report = run(load("connector.yaml"), "127.0.0.1:9000")
    print(report.as_table())

The suite uses gRPC and knows a connector only by its configuration file. It plays the role of the
runtime: it opens streams, loads, stores and commits, keeps a recovery log, kills the connector,
violates the protocol, and inspects the result. A check that cannot run is skipped with a reason. No
check passes without a test.
"""

from penstock.testing.conformance.check import CHECKS, Check, Need
from penstock.testing.conformance.config import Config, Pattern, load, parse
from penstock.testing.conformance.report import Outcome, Report, Result
from penstock.testing.conformance.suite import run

__all__ = [
    "CHECKS",
    "Check",
    "Config",
    "Need",
    "Outcome",
    "Pattern",
    "Report",
    "Result",
    "load",
    "parse",
    "run",
]
