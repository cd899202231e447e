"""Every kind of case from Flow has a test, or a reason why it does not apply."""

from pathlib import Path

from tests.protocol.vectors import CASES

ROOT = Path(__file__).parents[2]
TESTED = {
    "apply_behaviour": "tests/connectors/test_vectors.py",
    "chaos_scenario": "tests/chaos/test_scenarios.py",
    "collection_key_validation": "tests/materialize/test_described.py",
    "consistency_invariant": "tests/chaos/test_invariants.py",
    "driver_checkpoint_reduce": "tests/protocol/test_connector_state.py",
    "driver_scenario": "tests/connectors/test_vectors.py",
    "fence_commit": "tests/connectors/test_fences.py",
    "fence_install": "tests/connectors/test_fences.py",
    "fence_join_hazard": "tests/connectors/test_fences.py",
    "field_extraction": "tests/materialize/test_extracting.py",
    "field_selection": "tests/protocol/test_field_selection.py",
    "initial_splits": "tests/protocol/test_key_range.py",
    "json_compare": "tests/reduce/test_vectors.py",
    "lifecycle": "tests/conformance/test_lifecycle.py, tests/protocol/test_transaction.py, "
    "tests/materialize/test_exists.py, tests/materialize/test_spill.py",
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
    "standard_updates": "tests/reduce/test_vectors.py, tests/scripts/materialize/strategies.txt",
    "state_unchanged": "tests/protocol/test_connector_state.py",
    "tuple_order": "tests/data/test_packed.py",
    "tuple_pack": "tests/data/test_packed.py",
    "wire_proto": "tests/protocol/test_wire.py",
}
OTHERS = {
    "key_hash": "another hash; ours is XXH64",
    "partition_label": "collections have no journal partitions",
    "r_clock": "materializations are not split by clock",
    "range_keyed_state": "a later protocol version",
    "state_patches": "a later protocol version",
    "stdio_framing": "a later protocol version; connectors use gRPC",
    "wire_json_and_proto": "a later protocol version",
}


def test_every_kind_of_case_is_listed():
    kinds = {case["kind"] for case in CASES}
    assert kinds == {*TESTED, *OTHERS}


def test_every_listed_test_module_exists():
    named = {path for paths in TESTED.values() for path in paths.split(", ")}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
