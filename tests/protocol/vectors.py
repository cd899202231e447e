"""Test cases of Flow, by kind."""

import json
from pathlib import Path
from typing import Any

CASES = json.loads((Path(__file__).parent.parent / "vectors" / "flow.json").read_text())["cases"]


def cases(*kinds: str) -> list[Any]:
    selected = [case for case in CASES if case["kind"] in kinds]
    assert selected, kinds
    return selected


def name(case: Any) -> str:
    return str(case["id"])
