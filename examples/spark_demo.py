"""Collections in Spark, in one minute: joins as of a time, changes, a stream, an append.

A small bank moves money between accounts. Each transfer changes two collections at one time,
and the sum of all balances never changes. Spark reads both collections as of one time, the
latest and a past one, and gets the correct sum. A join of reads as of different times could
return a wrong one.
"""

import random
import tempfile
from pathlib import Path

import pyarrow as pa

import penstock.persist as persist
import penstock.spark as ps

PEOPLE = ("Ann", "Bob", "Cy", "Dee")
TRANSFERS = 300


def write_bank(url: str) -> int:
    """Write balances and journal atomically for each transfer, and return the last time."""
    rng = random.Random(11)
    row = pa.schema([("name", pa.string()), ("amount", pa.int64())])
    entry = pa.schema([("id", pa.int64()), ("payer", pa.string()), ("payee", pa.string())])
    with persist.open(url, writer="bank-1") as client:
        balances = client.create_or_load("balances", schema=row, key_columns=["name"])
        journal = client.create_or_load("journal", schema=entry, key_columns=["id"])
        holds = dict.fromkeys(PEOPLE, 1_000)
        opening = [({"name": name, "amount": amount}, 1, +1) for name, amount in holds.items()]
        client.append_all(
            [persist.AppendTo(balances, opening, 0, 2), persist.AppendTo(journal, [], 0, 2)]
        )
        for time in range(2, TRANSFERS + 2):
            payer, payee = rng.sample(PEOPLE, 2)
            moved = rng.randrange(1, 50)
            before = {name: holds[name] for name in (payer, payee)}
            holds[payer] -= moved
            holds[payee] += moved
            updates = [({"name": n, "amount": a}, time, -1) for n, a in before.items()]
            updates += [({"name": n, "amount": holds[n]}, time, +1) for n in before]
            entries = [({"id": time, "payer": payer, "payee": payee}, time, +1)]
            client.append_all(
                [
                    persist.AppendTo(balances, updates, time, time + 1),
                    persist.AppendTo(journal, entries, time, time + 1),
                ]
            )
        balances.allow_compaction(50).result()
        journal.allow_compaction(50).result()
        client.compact()
    return TRANSFERS + 1


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        lake = f"file:{folder}"
        last = write_bank(f"{lake}/bank")
        print(f"1. wrote {TRANSFERS} transfers, each to two collections at one time")

        spark = ps.session(app_name="penstock-demo")
        for as_of in (last, 100):
            both = ps.read_all(spark, lake, ["balances", "journal"], as_of)
            total = both["balances"].groupBy().sum("amount").first()[0]
            busiest = (
                both["balances"]
                .join(both["journal"], both["balances"].name == both["journal"].payer)
                .groupBy("name", "amount")
                .count()
                .orderBy("count", ascending=False)
                .first()
            )
            print(
                f"2. as of {as_of}: the sum of the balances is {total}; "
                f"{busiest['name']} paid {busiest['count']} times and has {busiest['amount']}"
            )
            assert total == 1_000 * len(PEOPLE)

        changes = ps.changes(spark, lake, "balances", 100, 110)
        moved = changes.groupBy().sum("mz_diff").first()[0]
        print(f"3. changes in [100, 110): {changes.count()} updates, sum of diffs {moved}")
        assert moved == 0

        summary = ps.read(spark, lake, "journal").groupBy("payer").count()
        time = ps.append(summary, lake, "payments_by_payer", key=["payer"])
        rows = ps.read(spark, lake, "payments_by_payer").count()
        print(f"4. a Spark job appended {rows} rows to a new collection, at time {time}")
        assert rows == len(PEOPLE)

        stream = (
            spark.readStream.format("penstock")
            .option("location", lake)
            .option("startAt", "100")
            .option("maxRowsPerTrigger", "200")
            .load("balances")
            .writeStream.format("memory")
            .queryName("balances")
            .option("checkpointLocation", str(Path(folder) / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        stream.awaitTermination()
        streamed = spark.sql("select sum(amount * mz_diff) from balances").first()[0]
        batches = len(stream.recentProgress)
        print(f"5. a stream returned the same sum in {batches} micro-batches: {streamed}")
        assert streamed == 1_000 * len(PEOPLE)
        spark.stop()


if __name__ == "__main__":
    main()
