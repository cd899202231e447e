"""Progress of streams, and progress relations, read without a Spark session."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import persist
from penstock.datasource.spark import ChangesReader, ContentsReader, PenstockSource
from penstock.errors import UsageError
from tests.ingest.test_relations import START
from tests.ingest.test_relations import lake as lake_fixture

lake = lake_fixture

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rows_of(reader: Any, parts: Any) -> list[Row]:
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def read(location: str, name: str, **options: str) -> list[Row]:
    source = PenstockSource({"location": location, "path": name, **options})
    reader = source.reader(source.schema())
    assert isinstance(reader, ContentsReader)
    return rows_of(reader, reader.partitions())


def stream(location: str, name: str, **options: str) -> tuple[list[str], list[Row]]:
    """Return the columns of a stream and the rows of its first batch."""
    source = PenstockSource({"location": location, "path": name, **options})
    schema = source.schema()
    reader = source.streamReader(schema)
    assert isinstance(reader, ChangesReader)
    try:
        start = reader.initialOffset()
        return schema.names, rows_of(reader, reader.partitions(start, reader.latestOffset(start)))
    finally:
        reader.stop()


def test_batch_reads_progress_and_remap(lake: str) -> None:
    assert [row["offset"] for row in read(lake, "src_progress")] == [3]
    assert [row["offset"] for row in read(lake, "src_progress", asOf="earliest")] == [2]
    assert [(row["partition"], row["mz_diff"]) for row in read(lake, "src_remap")] == [(0, 3)]


@pytest.mark.parametrize("snapshot", ["true", "false"])
def test_stream_reads_each_binding_of_progress(lake: str, snapshot: str) -> None:
    names, rows = stream(lake, "src_progress", startAt="earliest", snapshot=snapshot)
    assert names == ["partition", "offset", "mz_timestamp", "mz_diff"]
    assert [row["offset"] for row in rows] == [2, 3]
    assert all(row["mz_timestamp"] >= START and row["mz_diff"] == 1 for row in rows)


def test_stream_reads_the_counts_of_a_remap(lake: str) -> None:
    _, rows = stream(lake, "src_remap", startAt="latest")
    assert [row["mz_diff"] for row in rows] == [3]


def test_stream_with_progress_ends_each_batch_with_a_progress_row(lake: str) -> None:
    names, rows = stream(lake, "words", startAt="earliest", progress="true")
    assert names[-3:] == ["mz_timestamp", "mz_progressed", "mz_diff"]
    *updates, last = rows
    assert len(updates) == 3
    assert {row["mz_progressed"] for row in updates} == {False}
    with persist.open(f"{lake}/src", hold=False) as client:
        upper = client.collection("words").upper
    assert last == {**dict.fromkeys(names), "mz_timestamp": upper, "mz_progressed": True}


def test_stream_with_progress_of_a_quiet_collection_reports_its_upper(tmp_path: Any) -> None:
    with persist.open(f"file:{tmp_path}/a", writer="w") as client:
        quiet = client.create_or_load("quiet", key=persist.TEXT, value=persist.UNIT)
        quiet.seal(5).result()
    _, rows = stream(f"file:{tmp_path}", "quiet", startAt="0", snapshot="false", progress="true")
    assert [(row["mz_timestamp"], row["mz_progressed"], row["key"]) for row in rows] == [
        (5, True, None)
    ]


def test_stream_without_start_at_is_rejected_with_valid_values(
    lake: str,
) -> None:
    source = PenstockSource({"location": lake, "path": "words"})
    with pytest.raises(UsageError, match='requires option "startAt"') as raised:
        source.streamReader(source.schema())
    assert "latest, earliest, milliseconds since the epoch, or RFC 3339" in raised.value.hint
    with persist.open(f"{lake}/new", writer="w") as client:
        client.create_or_load("new", key=persist.TEXT, value=persist.UNIT)
    with pytest.raises(UsageError) as raised:
        PenstockSource({"location": lake, "path": "new"}).schema()
    assert "For spark.readStream, add the option startAt. Use latest" in raised.value.hint
