"""A collection in ten seconds: write, seal, kill -9, reopen, read past states, verify.

A child process writes the stock of a small shop to a collection, and seals one time after
another. It is killed with `kill -9`. The parent then reopens the collection, reads past
states, compares them with the states that the child reported as durable, and verifies every
object.
"""

import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import penstock.persist as persist

WARES = ("apples", "bread", "cheese", "dates")
SEALED_TIMES = 200


def write_stock(url: str) -> None:
    """Change the stock without end, and print each state after it is durable."""
    rng = random.Random(7)
    with persist.open(url, writer="shop-1") as client:
        stock = client.create_or_load("stock", key=persist.TEXT, value=persist.INT64)
        shelf = dict.fromkeys(WARES, 100)
        stock.compare_and_append([((ware, n), 0, +1) for ware, n in shelf.items()], 0, 1)
        time = 0
        while True:
            time += 1
            ware = rng.choice(WARES)
            before, after = shelf[ware], shelf[ware] + rng.randrange(-9, 10)
            shelf[ware] = after
            # Retract the old row and insert the new one, at one time.
            stock.write([((ware, before), time, -1), ((ware, after), time, +1)]).result()
            stock.seal(time + 1).result()
            print(f"{time} {' '.join(f'{w}={n}' for w, n in shelf.items())}", flush=True)


def run_until_killed(url: str) -> dict[int, dict[str, int]]:
    """Run the child, kill it, and return the states that it reported, by time."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", url], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    reported: dict[int, dict[str, int]] = {}
    try:
        for line in child.stdout:
            time, *shelf = line.split()
            reported[int(time)] = {w: int(n) for w, n in (item.split("=") for item in shelf)}
            if len(reported) == SEALED_TIMES:
                break
    finally:
        child.send_signal(signal.SIGKILL)
        remaining, _ = child.communicate()
    for line in remaining.splitlines():
        time, *shelf = line.split()
        if len(shelf) == len(WARES):
            reported[int(time)] = {w: int(n) for w, n in (item.split("=") for item in shelf)}
    return reported


def contents(stock: persist.Collection, as_of: int) -> dict[str, int]:
    """Return the stock as of a time, and check that each ware occurs exactly once."""
    rows = list(stock.snapshot(as_of))
    assert all(row.diff == 1 for row in rows), rows
    assert max(Counter(row.data[0] for row in rows).values()) == 1, rows
    return {ware: n for (ware, n), _, _ in rows}


def main() -> None:
    """Run the example and check each step."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        url = f"file:{Path(folder) / 'data'}"
        print(f"1. a child process writes stock to {url}")
        reported = run_until_killed(url)
        last = max(reported)
        print(f"2. kill -9 after {last} sealed times")
        with persist.open(url, writer="shop-1") as client:
            stock = client.collection("stock")
            unsealed = sum(batch.updates for batch in client.unsealed())
            print(f"3. reopened in epoch {client.epoch}: upper {stock.upper}, {unsealed} unsealed")
            for as_of in (last // 2, last):
                now = contents(stock, as_of)
                assert now == reported[as_of], (now, reported[as_of])
                print(f"4. as of {as_of:4}: {now}, as the child reported")
            for as_of, shelf in reported.items():
                assert contents(stock, as_of) == shelf
            print(f"5. all {len(reported)} past states are as the child reported them")
            stock.allow_compaction(last // 2).result()
            client.compact()
            for as_of in range(last // 2, last + 1):
                assert contents(stock, as_of) == reported[as_of]
            batches = len(stock.state.batches)
            print(f"6. compacted to {batches} batch(es): states from {last // 2} on are unchanged")
        print("7. penstock verify:", flush=True)
        subprocess.run([sys.executable, "-m", "penstock.cli.main", "verify", url], check=True)
        print("8. penstock read, as of the last time:", flush=True)
        command = [sys.executable, "-m", "penstock.cli.main", "read", url, "stock"]
        subprocess.run([*command, "--as-of", str(last)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        write_stock(sys.argv[2])
    else:
        main()
