"""Imports of the forkserver, shared by all forked processes."""

import jsonschema
import numpy as np
import pandas as pd
import psycopg
import pyarrow
import pyarrow as pa
import pyarrow.acero
import pyarrow.compute as pc
import pyarrow.dataset
import pytest

from penstock.data.packed import key_hashes, pack
from tests.chaos import actors

IMPORTED = (actors, jsonschema, pd, psycopg, pyarrow.acero, pyarrow.dataset, pytest)

_numbers = pa.array(np.arange(4))
_packed = pack([_numbers, pa.array(["a"] * 4)])
key_hashes(_packed)
pc.sort_indices(pa.table({"n": _numbers}), sort_keys=[("n", "ascending")])
