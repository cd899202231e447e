"""Transaction ids as Debezium's connectors write them."""

import pyarrow as pa
import pytest

from penstock.sources.debezium import transaction_ids

ONE = [
    "36eb1ba7-6b2f-11ee-9d6b-0242ac110002:23",  # MySQL
    "file=mysql-bin.000003,pos=154",
    "0-1-5",  # MariaDB
    "00000025:00000d08:0025",  # SQL Server, Db2
    '{"id": {"$binary": "fdlk"}, "uid": {"$binary": "47"}}:7',  # MongoDB
    "1462833718356672513",
    "5.6.641",  # Oracle
    "05000600810200ff",
    '[{"keyspace":"k","shard":"0","gtid":"MySQL56/e03ece6c-4c04-11ec-8e20-0242ac110004:1-37"}]',
    "571",  # Postgres, before Debezium 1.9
    "571:-1",
    "571:53195829\n",
]


@pytest.mark.parametrize("id", ONE)
def test_transaction_id_without_position_is_used_unchanged(id: str) -> None:
    assert transaction_ids.split(id) == (id, transaction_ids.NO_POSITION)
    assert transaction_ids.join(id) == id


def test_postgres_transaction_id_is_split_into_xid_and_lsn() -> None:
    assert transaction_ids.split("571:53195829") == ("571", 53195829)
    assert transaction_ids.join("571:53195829") == "571@53195829"
    assert transaction_ids.split("571@53195829") == ("571@53195829", transaction_ids.NO_POSITION)


def test_transaction_ids_in_arrow_array_are_split_as_single_ids_are() -> None:
    some = [*ONE, "571:53195829", "4294967295:999999999999999999"]
    names, at = transaction_ids.split_array(pa.chunked_array([[*some, None]], pa.string()))
    assert [*zip(names.to_pylist(), at.to_pylist(), strict=True)] == [
        *map(transaction_ids.split, some),
        (None, transaction_ids.NO_POSITION),
    ]
    made = transaction_ids.join_array(pa.array([*some, None], pa.string()))
    assert made.to_pylist() == [*map(transaction_ids.join, some), None]
