"""The memory of an initial snapshot does not depend on the size of the collection."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock import persist
from penstock.data import DIFF, TIME
from tests.materialize.lake import KEYED, SCHEMA, row

ROWS = 16_000
WIDTH = 5_000
PART_BYTES = 4 << 20
BOUND_BYTES = 144 << 20
"""Bound for requests in flight, a few parts and heap overhead: less than the stored documents."""


def test_initial_snapshot_at_one_time_is_one_transaction_in_bounded_memory(tmp_path: Path) -> None:
    settings = persist.Settings(part_bytes=PART_BYTES, background=False)
    with persist.open(f"file:{tmp_path}/lake/shop", writer="upstream", settings=settings) as client:
        few = client.create_or_load("shop.few", **KEYED)
        few.compare_and_append([(row(1), 0, 1)], 0, 10)
        many = client.create_or_load("shop.t", **KEYED)
        ids, ones = np.arange(ROWS), np.ones(ROWS, np.int64)
        texts = pa.array([f"{n:02}" * (WIDTH // 2) for n in range(32)])
        columns = [ids, texts.take(pa.array(ids % 32)), ids, 3 * ones, ones]
        many.compare_and_append(pa.table(columns, names=[*SCHEMA.names, TIME, DIFF]), 0, 10)
        many.allow_compaction(5).result()
        client.compact()
        (batch,) = client.state.named("shop.t").batches
        assert len(batch.parts) > 15
    ended = subprocess.run(
        [sys.executable, "-m", "tests.materialize.snapshot_memory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    right, wrong = told["right"], told["wrong"]
    assert right["documents"] == ROWS
    assert right["transactions"] == 1
    assert right["bytes"] > BOUND_BYTES
    assert right["grown"] < BOUND_BYTES
    assert wrong["transactions"] == 0
    assert wrong["grown"] > BOUND_BYTES, "a snapshot that collects all rows is detected"
