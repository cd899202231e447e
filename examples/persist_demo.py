"""What there is today, in ten seconds: write, seal, kill -9, reopen, read the past, verify.

A child process keeps the stock of a small shop in a collection, one sealed time
after another. It is killed in the middle. Then the same collection is opened
again, read as of two times, compared with what the child had been told was
durable, and verified object by object.
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
ENOUGH = 200


def keep_shop(url: str) -> None:
    """Sell and restock for ever; say what is durable, after it is."""
    chance = random.Random(7)
    with persist.open(url, writer="shop-1") as client:
        stock = client.create_or_load("stock", key=persist.TEXT, value=persist.INT64)
        shelf = dict.fromkeys(WARES, 100)
        stock.compare_and_append([((ware, n), 0, +1) for ware, n in shelf.items()], 0, 1)
        time = 0
        while True:
            time += 1
            ware = chance.choice(WARES)
            before, after = shelf[ware], shelf[ware] + chance.randrange(-9, 10)
            shelf[ware] = after
            # The old row goes and the new one comes, at one time.
            stock.write([((ware, before), time, -1), ((ware, after), time, +1)]).result()
            stock.seal(time + 1).result()
            print(f"{time} {' '.join(f'{w}={n}' for w, n in shelf.items())}", flush=True)


def run_until_killed(url: str) -> dict[int, dict[str, int]]:
    """What the child was told was durable, by time."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", url], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    told: dict[int, dict[str, int]] = {}
    try:
        for line in child.stdout:
            time, *shelf = line.split()
            told[int(time)] = {w: int(n) for w, n in (item.split("=") for item in shelf)}
            if len(told) == ENOUGH:
                break
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
    for line in rest.splitlines():
        time, *shelf = line.split()
        if len(shelf) == len(WARES):
            told[int(time)] = {w: int(n) for w, n in (item.split("=") for item in shelf)}
    return told


def contents(stock: persist.Collection, as_of: int) -> dict[str, int]:
    """The shelf as of a time; each ware is there exactly once."""
    rows = list(stock.snapshot(as_of))
    assert all(row.diff == 1 for row in rows), rows
    assert max(Counter(row.data[0] for row in rows).values()) == 1, rows
    return {ware: n for (ware, n), _, _ in rows}


def main() -> None:
    """Tell the story and check it."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        url = f"file:{Path(folder) / 'data'}"
        print(f"1. a writer keeps a shop's stock in {url}")
        told = run_until_killed(url)
        last = max(told)
        print(f"2. kill -9 after {last} sealed times")
        with persist.open(url, writer="shop-1") as client:
            stock = client.collection("stock")
            left = sum(each.updates for each in client.unsealed())
            print(f"3. reopened in epoch {client.epoch}: upper is {stock.upper}, {left} unsealed")
            for as_of in (last // 2, last):
                now = contents(stock, as_of)
                assert now == told[as_of], (now, told[as_of])
                print(f"4. as of {as_of:4}: {now}, as it was told then")
            for as_of, shelf in told.items():
                assert contents(stock, as_of) == shelf
            print(f"5. all {len(told)} past states are as they were told")
            stock.allow_compaction(last // 2).result()
            client.compact()
            for as_of in range(last // 2, last + 1):
                assert contents(stock, as_of) == told[as_of]
            batches = len(stock.state.batches)
            print(
                f"6. compacted to {batches} batch(es): every state from {last // 2} on is the same"
            )
        print("7. penstock verify:", flush=True)
        subprocess.run([sys.executable, "-m", "penstock.cli.main", "verify", url], check=True)
        print("8. penstock read, as of the last time:", flush=True)
        command = [sys.executable, "-m", "penstock.cli.main", "read", url, "stock"]
        subprocess.run([*command, "--as-of", str(last)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        keep_shop(sys.argv[2])
    else:
        main()
