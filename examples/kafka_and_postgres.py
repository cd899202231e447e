"""A topic of Kafka and a table of Postgres, joined as of one time, and together in SQLite.

    python examples/kafka_and_postgres.py

Customers are in a Postgres, what they click on comes by a topic. `penstock up` follows both,
and one task writes both into SQLite, in transactions that hold the two as of one time. A
customer moves while clicks go on. Then both are joined in Spark, as of now and as of before the
move; and SQLite gives the same answer as Spark does for the time that it has come to.
"""

import json
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from bank import pause, started
from confluent_kafka import Producer

import penstock.spark as ps
from penstock.testing.kafka import KafkaBroker
from penstock.testing.postgres import PostgresServer

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
    """To two partitions, each acknowledged."""
    producer = Producer(broker.client())
    for customer, page in clicks:
        value = json.dumps({"customer": customer, "page": page})
        producer.produce("clicks", value=value, partition=customer % 2)
    producer.flush()


def in_sqlite(report: Path, query: str = BY_CITY) -> list[tuple[object, ...]]:
    """What SQLite answers; nothing, before there are tables."""
    try:
        with closing(sqlite3.connect(report)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []


def wait_for(running: "subprocess.Popen[bytes]", report: Path, clicks: int, city: str) -> None:
    """Until SQLite has so many clicks, and the first customer lives there."""
    wanted = [(clicks, city)]
    query = "SELECT (SELECT count(*) FROM clicks), (SELECT city FROM customers WHERE id = 1)"
    for _ in range(1_200):
        if running.poll() is not None:
            said = report.with_name("log").read_text(errors="replace")
            raise SystemExit(f"{said}\npenstock up ended with {running.returncode}")
        if in_sqlite(report, query) == wanted:
            return
        pause(100)
    raise SystemExit("nothing arrived within two minutes")


def main() -> None:
    """Tell the story and check it."""
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
        print("1. two customers in a Postgres, three clicks in a topic; penstock up starts")
        running = started("up", file, "--http", "none", log=folder / "log")
        try:
            wait_for(running, report, 3, "Bern")
            before = in_sqlite(report)
            print(f"2. one task has written both into SQLite; clicks by city: {before}")
            shop.sql("UPDATE customers SET city = 'Delft' WHERE id = 1")
            send(broker, [(1, "/order"), (2, "/help")])
            wait_for(running, report, 5, "Delft")
            after = in_sqlite(report)
            print(f"3. Ada has moved, and there were two more clicks: {after}")
        finally:
            running.terminate()
            running.wait()
        join(f"file:{folder}/lake", before, after)


def join(lake: str, before: list[tuple[object, ...]], after: list[tuple[object, ...]]) -> None:
    """The same in Spark, as of one time for both."""
    spark = ps.session()
    try:
        now, first = (by_city(spark, lake, as_of) for as_of in (None, "earliest"))
        print(f"4. joined by Spark as of the latest time of both: {now}")
        assert now == after, (now, after)
        print(f"5. and as of the earliest: {first}")
        assert first == before, (first, before)
    finally:
        spark.stop()


def by_city(spark: object, lake: str, as_of: str | None) -> list[tuple[object, ...]]:
    """Clicks by city of the customer, as of one time."""
    both = ps.read_all(spark, lake, [CUSTOMERS, "clicks"], as_of)
    joined = both["clicks"].join(both[CUSTOMERS], both["clicks"].customer == both[CUSTOMERS].id)
    return sorted(map(tuple, joined.groupBy("city").count().collect()))


if __name__ == "__main__":
    main()
