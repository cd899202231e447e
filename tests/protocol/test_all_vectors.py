"""Every case that was read from Flow is tested, or it is said why it is not ours."""

from tests.protocol.vectors import CASES

TESTED = {
    "apply_behaviour": "tests/connectors/test_vectors.py",
    "driver_checkpoint_reduce": "tests/protocol/test_state.py",
    "driver_scenario": "tests/connectors/test_vectors.py",
    "fence_commit": "tests/connectors/test_fences.py",
    "fence_install": "tests/connectors/test_fences.py",
    "fence_join_hazard": "tests/connectors/test_fences.py",
    "field_selection": "tests/protocol/test_selection.py",
    "initial_splits": "tests/protocol/test_ranges.py",
    "lifecycle": "tests/conformance/test_lifecycle.py, tests/protocol/test_transaction.py",
    "message_validation": "tests/protocol/test_wire.py",
    "postgres_type_mapping": "tests/connectors/postgres/test_dialect.py",
    "shard_routing": "tests/protocol/test_ranges.py",
    "shard_split": "tests/protocol/test_ranges.py",
    "single_scalar_type": "tests/protocol/test_selection.py",
    "sql_constraints_existing": "tests/connectors/test_vectors.py",
    "sql_constraints_new": "tests/connectors/test_vectors.py",
    "state_unchanged": "tests/protocol/test_state.py",
    "tuple_order": "tests/data/test_packed.py",
    "tuple_pack": "tests/data/test_packed.py",
    "wire_proto": "tests/protocol/test_wire.py",
}
LATER = {
    "chaos_scenario": "of the runtime",
    "collection_key_validation": "of the runtime, which builds collections",
    "consistency_invariant": "of the runtime",
    "field_extraction": "of the runtime, which extracts fields",
    "json_compare": "of reductions",
    "materialize_fixture": "of the runtime",
    "preview_fixture_format": "of the runtime",
    "reduce_sequence": "of reductions",
    "schema_inference": "of the runtime, which infers",
    "standard_updates": "of reductions",
}
OTHERS = {
    "key_hash": "another hash; ours is XXH64",
    "partition_label": "there are no partitions of journals",
    "r_clock": "materializations are not split by clock",
    "range_keyed_state": "of a later generation",
    "state_patches": "of a later generation",
    "stdio_framing": "of a later generation; connectors are spoken to by gRPC",
    "wire_json_and_proto": "of a later generation",
}


def test_no_kind_of_case_is_forgotten():
    kinds = {case["kind"] for case in CASES}
    listed = {*TESTED, *LATER, *OTHERS}
    assert kinds == listed
