from penstock.persist.paths import (
    batch_key,
    hold_key,
    hold_of,
    marker_key,
    number_of,
    rollup_key,
    staging_of,
)


def test_object_key_parses_to_its_components():
    assert number_of(rollup_key(7)) == 7
    assert hold_of(hold_key("d-shop.2", 3)) == ("d-shop.2", 3)
    assert staging_of(batch_key("12-3", "0f")) == "12-3"
    assert staging_of(marker_key("12-3", "0f")) == "12-3"


def test_foreign_object_key_parses_to_none():
    for name in (".DS_Store", "notes", "7", "x/00000000000000000007.bak", "a/b/c", "x/7"):
        assert number_of(f"rollup/{name}") is None
        assert hold_of(f"hold/{name}") is None
        assert staging_of(f"batch/{name}") is None
    assert staging_of("batch/old/0f.parquet") is None
