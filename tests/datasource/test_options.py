import pytest

from penstock.datasource.options import BatchOptions, StreamOptions, parse
from penstock.errors import UsageError

PLACE = {"location": "file:./data", "path": "orders"}


def test_a_batch_reads_the_latest_contents_under_a_hold_of_an_hour():
    assert parse(PLACE) == BatchOptions(
        location="file:./data",
        collection="orders",
        as_of="latest",
        hold=True,
        hold_for_ms=3_600_000,
    )


def test_a_stream_begins_with_the_contents_and_takes_all_there_is():
    assert parse({**PLACE, "startAt": "latest"}) == StreamOptions(
        location="file:./data", collection="orders", start_at="latest", snapshot=True, max_rows=None
    )


def test_options_are_understood_in_any_case_and_the_collection_by_either_name():
    given = {
        "LOCATION": "memory:x",
        "Collection": "c",
        "ASOF": "7",
        "holdfor": "90s",
        "hold": "False",
    }
    assert parse(given) == BatchOptions(
        location="memory:x", collection="c", as_of="7", hold=False, hold_for_ms=90_000
    )


def test_a_streams_hold_may_have_a_name():
    options = {**PLACE, "startAt": "5", "hold": "nightly", "maxRowsPerTrigger": "10"}
    found = parse(options)
    assert isinstance(found, StreamOptions)
    assert (found.hold, found.owner, found.max_rows) == (True, "nightly", 10)
    without = parse({**PLACE, "startAt": "5", "hold": "false", "snapshot": "false"})
    assert isinstance(without, StreamOptions)
    assert (without.hold, without.owner, without.snapshot) == (False, None, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "orders"}, 'format "penstock" needs option "location"'),
        ({"location": "memory:x"}, 'format "penstock" needs option "collection"'),
        ({**PLACE, "as_of": "7"}, 'format "penstock" has no option "as_of"'),
        ({**PLACE, "snapshot": "true"}, 'option "snapshot" needs "startAt"'),
        (
            {**PLACE, "startAt": "1", "asOf": "2"},
            'option "asOf" does not go together with "startAt"',
        ),
        ({**PLACE, "collection": "others"}, 'two collections are named: "orders" and "others"'),
        ({**PLACE, "hold": "nightly"}, 'option "hold" is "nightly"'),
        ({**PLACE, "holdFor": "1 hour"}, 'option "holdFor" is "1 hour"'),
        ({**PLACE, "holdFor": "0h"}, 'option "holdFor" is "0h"'),
        ({**PLACE, "maxTaskBytes": "1g"}, 'option "maxTaskBytes" is "1g"'),
        ({**PLACE, "startAt": "1", "maxRowsPerTrigger": "0"}, 'option "maxRowsPerTrigger" is "0"'),
        ({**PLACE, "startAt": "1", "snapshot": "no"}, 'option "snapshot" is "no"'),
    ],
)
def test_what_is_not_understood_is_refused_by_name(options, message):
    with pytest.raises(UsageError) as caught:
        parse(options)
    assert str(caught.value) == message
    assert caught.value.hint
