"""Cases read from Flow's own tests; those of one kind."""

import json
from pathlib import Path
from typing import Any

CASES = json.loads((Path(__file__).parent.parent / "vectors" / "flow.json").read_text())["cases"]


def cases(*kinds: str) -> list[Any]:
    found = [case for case in CASES if case["kind"] in kinds]
    assert found, kinds
    return found


def name(case: Any) -> str:
    return str(case["id"])
