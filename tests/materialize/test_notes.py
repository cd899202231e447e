"""What a materialization writes down, as the page on the format at rest has it."""

import json
import re
from pathlib import Path

import msgspec

from penstock import persist
from penstock.materialize.checkpoint import Checkpoint, Reached
from tests.materialize.lake import Endpoint, Table, bring, notes

PAGE = Path(__file__).parents[2] / "docs/reference/format.md"


def listed(heading: str) -> list[str]:
    """The fields that the page lists, but those that are left out by default."""
    _, _, after = PAGE.read_text().partition(f"### {heading}\n")
    return re.findall(r"^\| `(\w+)` \| (?!.*`= )", re.split(r"\n#", after)[0], re.MULTILINE)


def test_the_page_on_the_format_lists_the_notes(lake: str, table: Table, tmp_path: Path) -> None:
    bring(lake, Endpoint("sqlite", tmp_path), tmp_path, shards=2)
    known = notes(lake)
    assert {*known["materialization"]} == {*listed("Note of the whole")}
    for key_range in ("00000000-7fffffff", "80000000-ffffffff"):
        shard = known[f"shard {key_range}"]
        assert {*shard} == {*listed("Note of a shard")}
        assert f"{shard['begin']:08x}-{shard['end']:08x}" == key_range
        assert shard["checkpoint"] == shard["settled"]
        checkpoint = json.loads(shard["checkpoint"])
        assert [*checkpoint] == listed("Checkpoint")
        (path, reached), *_ = checkpoint["bindings"].items()
        assert json.loads(path) == ["t"]
        assert [*reached] == listed("Reached")
        assert reached["frontier"] == table.collection.upper
        with persist.open(f"{lake}/local") as own:
            assert checkpoint["materialization"] == own.state.location
        collection = table.client.state.named("shop.t")
        assert reached["collection"] == f"{table.client.state.location}/{collection.id}"
    assert [*msgspec.structs.asdict(Checkpoint("", {}))] == listed("Checkpoint")
    assert [*msgspec.structs.asdict(Reached("", 0, 0))] == [*listed("Reached"), "columns"]
