"""Every vector is executed by a test, or listed with the decision that overrules it.

The vectors of Flow are executed by kind: a test module reads all cases of a kind. The vectors of
Materialize are executed by id.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]


def read_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((ROOT / f"tests/vectors/{name}.json").read_text())[
        "cases"
    ]
    assert cases
    return cases


FLOW_TESTED: Final = {
    "apply_behaviour": "tests/connectors/test_vectors.py",
    "chaos_scenario": "tests/chaos/test_invariants.py",
    "collection_key_validation": "tests/materialize/test_document_spec.py",
    "consistency_invariant": "tests/chaos/test_invariants.py",
    "driver_checkpoint_reduce": "tests/protocol/test_connector_state.py",
    "driver_scenario": "tests/connectors/test_vectors.py",
    "fence_commit": "tests/connectors/test_fences.py",
    "fence_install": "tests/connectors/test_fences.py",
    "fence_join_hazard": "tests/connectors/test_fences.py",
    "field_extraction": "tests/materialize/test_document_fields.py",
    "field_selection": "tests/protocol/test_field_selection.py",
    "initial_splits": "tests/protocol/test_key_range.py",
    "json_compare": "tests/reduce/test_vectors.py",
    "lifecycle": "tests/conformance/test_lifecycle.py",
    "materialize_fixture": "tests/materialize/test_fixtures.py",
    "message_validation": "tests/protocol/test_wire.py",
    "postgres_type_mapping": "tests/connectors/postgres/test_dialect.py",
    "preview_fixture_format": "tests/materialize/test_fixtures.py",
    "reduce_sequence": "tests/reduce/test_vectors.py",
    "schema_inference": "tests/reduce/test_inference.py",
    "shard_routing": "tests/protocol/test_key_range.py",
    "shard_split": "tests/protocol/test_key_range.py",
    "single_scalar_type": "tests/protocol/test_field_selection.py",
    "sql_constraints_existing": "tests/connectors/test_vectors.py",
    "sql_constraints_new": "tests/connectors/test_vectors.py",
    "standard_updates": "tests/reduce/test_vectors.py",
    "state_unchanged": "tests/protocol/test_connector_state.py",
    "tuple_order": "tests/data/test_packed.py",
    "tuple_pack": "tests/data/test_packed.py",
    "wire_proto": "tests/protocol/test_wire.py",
}
FLOW_NOT_APPLICABLE: Final = {
    "key_hash": "another hash; ours is XXH64",
    "partition_label": "collections have no journal partitions",
    "r_clock": "materializations are not split by clock",
    "range_keyed_state": "a later protocol version",
    "state_patches": "a later protocol version",
    "stdio_framing": "a later protocol version; connectors use gRPC",
    "wire_json_and_proto": "a later protocol version",
}


MATERIALIZE_TESTED: Final = {
    "R": "tests/reclock/test_vectors.py",
    "P": "tests/persist/test_vectors.py",
    "S": "tests/persist/test_vectors.py",
    "T": "tests/sources/postgres/types/test_vectors.py",
    "D": "tests/ingest/test_schema_change_vectors.py",
    "G": "tests/ingest/test_vectors.py",
    "Q": "tests/cli/test_tail_vectors.py",
    "X": "tests/catalog/test_vectors.py",
    "K": "tests/sources/kafka/test_scan.py",
    "X11": "tests/sources/postgres/test_lsn.py",
}
"""Test module of each family, by the letter of its ids; one vector has a module of its own."""

MATERIALIZE_NOT_APPLICABLE: Final = {
    "Q10": "an envelope of SUBSCRIBE: `penstock tail` prints rows and diffs",
    "Q11": "as Q10",
    "X08b": "no CREATE SOURCES statement: a pipeline file lists the tables",
    "X09": "as X08b: tables of one source share a slot; one is removed alone in tests/e2e",
}


def test_every_kind_of_flow_is_executed_or_listed() -> None:
    kinds = {case["kind"] for case in read_cases("flow")}
    assert kinds == {*FLOW_TESTED, *FLOW_NOT_APPLICABLE}


@pytest.mark.parametrize("kind", FLOW_TESTED)
def test_module_of_a_kind_reads_its_cases(kind: str) -> None:
    module = (ROOT / FLOW_TESTED[kind]).read_text()
    ids = [case["id"] for case in read_cases("flow") if case["kind"] == kind]
    assert f'"{kind}"' in module or all(f'"{id}"' in module for id in ids)


@pytest.mark.parametrize("id", [case["id"] for case in read_cases("materialize")])
def test_vector_of_materialize_is_named_by_the_module_of_its_family(id: str) -> None:
    module = (ROOT / MATERIALIZE_TESTED.get(id, MATERIALIZE_TESTED[id[0]])).read_text()
    is_named = re.search(rf'"{id}"|_{id.lower()}_', module) is not None
    assert is_named != (id in MATERIALIZE_NOT_APPLICABLE)
