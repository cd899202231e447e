import pytest

from penstock.datasource.options import BatchOptions, StreamOptions, parse_read_options
from penstock.errors import UsageError

PLACE = {"location": "file:./data", "path": "orders"}


def test_batch_options_default_to_latest_and_hold_of_one_hour():
    assert parse_read_options(PLACE) == BatchOptions(
        location="file:./data",
        collection="orders",
        as_of="latest",
        hold=True,
        hold_for_ms=3_600_000,
    )


def test_stream_options_default_to_snapshot_without_limit():
    assert parse_read_options({**PLACE, "startAt": "latest"}) == StreamOptions(
        location="file:./data", collection="orders", start_at="latest", snapshot=True, max_rows=None
    )


def test_option_names_ignore_case_and_path_names_the_collection():
    given = {
        "LOCATION": "memory:x",
        "Collection": "c",
        "ASOF": "7",
        "holdfor": "90s",
        "hold": "False",
    }
    assert parse_read_options(given) == BatchOptions(
        location="memory:x", collection="c", as_of="7", hold=False, hold_for_ms=90_000
    )


def test_stream_hold_with_name_is_durable():
    options = {**PLACE, "startAt": "5", "hold": "nightly", "maxRowsPerTrigger": "10"}
    parsed = parse_read_options(options)
    assert isinstance(parsed, StreamOptions)
    assert (parsed.hold, parsed.owner, parsed.max_rows) == (True, "nightly", 10)
    without = parse_read_options({**PLACE, "startAt": "5", "hold": "false", "snapshot": "false"})
    assert isinstance(without, StreamOptions)
    assert (without.hold, without.owner, without.snapshot) == (False, None, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "orders"}, 'format "penstock" requires option "location"'),
        ({"location": "memory:x"}, 'format "penstock" requires option "collection"'),
        ({**PLACE, "as_of": "7"}, 'format "penstock" has no option "as_of"'),
        ({**PLACE, "snapshot": "true"}, 'option "snapshot" requires "startAt"'),
        (
            {**PLACE, "startAt": "1", "asOf": "2"},
            'option "asOf" cannot be combined with "startAt"',
        ),
        ({**PLACE, "collection": "others"}, 'two collections are named: "orders" and "others"'),
        ({**PLACE, "hold": "nightly"}, 'option "hold" has the invalid value "nightly"'),
        ({**PLACE, "holdFor": "1 hour"}, 'option "holdFor" has the invalid value "1 hour"'),
        ({**PLACE, "holdFor": "0h"}, 'option "holdFor" has the invalid value "0h"'),
        ({**PLACE, "maxTaskBytes": "1g"}, 'option "maxTaskBytes" has the invalid value "1g"'),
        (
            {**PLACE, "startAt": "1", "maxRowsPerTrigger": "0"},
            'option "maxRowsPerTrigger" has the invalid value "0"',
        ),
        (
            {**PLACE, "startAt": "1", "snapshot": "no"},
            'option "snapshot" has the invalid value "no"',
        ),
    ],
)
def test_invalid_option_raises_usage_error(options, message):
    with pytest.raises(UsageError) as caught:
        parse_read_options(options)
    assert str(caught.value) == message
    assert caught.value.hint
