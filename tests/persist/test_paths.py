from penstock.persist.paths import (
    batch_key,
    hold_key,
    hold_of,
    marker_key,
    number_of,
    rollup_key,
    staging_of,
)


def test_a_key_says_what_it_was_made_of():
    assert number_of(rollup_key(7)) == 7
    assert hold_of(hold_key("d-shop.2", 3)) == ("d-shop.2", 3)
    assert staging_of(batch_key("12-3", "0f")) == "12-3"
    assert staging_of(marker_key("12-3", "0f")) == "12-3"


def test_names_that_are_not_ours_say_nothing():
    for name in (".DS_Store", "notes", "7", "x/00000000000000000007.bak", "a/b/c", "x/7"):
        assert number_of(f"rollup/{name}") is None
        assert hold_of(f"hold/{name}") is None
        assert staging_of(f"batch/{name}") is None
    assert staging_of("batch/old/0f.parquet") is None
