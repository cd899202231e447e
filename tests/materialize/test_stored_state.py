"""Stored state of a materialization, compared with docs/reference/format.md."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import persist
from penstock.errors import UsageError
from penstock.materialize.checkpoint import Checkpoint, ResourceProgress
from penstock.materialize.teardown import load_applied
from penstock.persist.state_store import StateStore
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.specs import (
    CollectionSpec,
    FieldSelection,
    MaterializationBinding,
    MaterializationSpec,
)
from penstock.protocol.wire import encode
from tests.materialize.lake import Endpoint, Table, bring, stored_state

PAGE = Path(__file__).parents[2] / "docs/reference/format.md"


def listed(heading: str) -> list[str]:
    """Return the fields that the page lists, except fields that are omitted by default."""
    _, _, after = PAGE.read_text().partition(f"### {heading}\n")
    return re.findall(r"^\| `(\w+)` \| (?!.*`= )", re.split(r"\n#", after)[0], re.MULTILINE)


def test_format_page_lists_fields_of_materialization_state(
    lake: str, table: Table, tmp_path: Path
) -> None:
    bring(lake, Endpoint("sqlite", tmp_path), tmp_path, shards=2)
    known = stored_state(lake)
    assert {*known["materialization"]} == {*listed("Materialization state")}
    for key_range in ("00000000-7fffffff", "80000000-ffffffff"):
        shard = known[f"shard {key_range}"]
        assert {*shard} == {*listed("Shard state")}
        assert f"{shard['begin']:08x}-{shard['end']:08x}" == key_range
        assert shard["checkpoint"] == shard["settled"]
        checkpoint = json.loads(shard["checkpoint"])
        assert [*checkpoint] == listed("Checkpoint")
        (path, reached), *_ = checkpoint["bindings"].items()
        assert json.loads(path) == ["t"]
        assert [*reached] == [*listed("Reached"), "layout"]
        assert reached["frontier"] == table.collection.upper
        with persist.open(f"{lake}/local") as own:
            assert checkpoint["materialization"] == own.state.location
        collection = table.client.state.named("shop.t")
        assert reached["collection"] == f"{table.client.state.location}/{collection.id}"
    assert [*msgspec.structs.asdict(Checkpoint("", {}))] == listed("Checkpoint")
    assert [*msgspec.structs.asdict(ResourceProgress("", 0, 0))] == [
        *listed("Reached"),
        "columns",
        "layout",
    ]


def test_applied_spec_at_rest_omits_endpoint_and_resource_config(
    lake: str, table: Table, tmp_path: Path
) -> None:
    said = {"table": "t", "adopt": False}
    given = [{"collection": "shop.t", "resource": said}]
    endpoint = Endpoint("sqlite", tmp_path)
    bring(lake, endpoint, tmp_path, bindings=given)
    spec = base64.b64decode(stored_state(lake)["applied"]["spec"])
    assert b"adopt" not in spec
    assert b"t.db" not in spec
    section = {"connector": "sqlite", "endpoint": endpoint.config, "bindings": given}
    with persist.open(f"{lake}/local") as client:
        memory = StateStore(client, "local")
        found = load_applied(memory, MaterializationSection.model_validate(section))
        assert found is not None
        assert json.loads(found[0].bindings[0].resource_spec_json) == said
        assert json.loads(found[0].endpoint_spec_json) == endpoint.config
        said["adopt"] = True
        with pytest.raises(UsageError, match='another config for resource "t"'):
            load_applied(memory, MaterializationSection.model_validate(section))


def test_applied_spec_of_earlier_version_is_read_with_its_resource_config() -> None:
    resource = '{"table": "t"}'
    collection = CollectionSpec("shop.t", (), ())
    binding = MaterializationBinding(resource, ("t",), collection, FieldSelection())
    spec = MaterializationSpec("local", "{}", (binding,))
    known = {"spec": base64.b64encode(encode(spec)).decode(), "version": "v"}

    class Remembered:
        def get(self, name: str) -> Any:
            return known

    section = MaterializationSection.model_validate({"connector": "sqlite", "bindings": []})
    found = load_applied(Remembered(), section)  # type: ignore[arg-type]
    assert found == (spec, "v")
