"""Whether a connector keeps the materialization protocol, in whatever language it is written.

    report = run(load("connector.yaml"), "127.0.0.1:9000")
    print(report.as_table())

The suite speaks gRPC, and knows nothing of a connector but what its file says. It
plays the runtime: it opens streams, loads, stores and commits, keeps a recovery log,
kills the connector, breaks the rules, and looks at what came of it. What it could
not test is skipped and says why; nothing passes that was not tested.
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
