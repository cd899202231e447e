"""Last event of each partition that waits for its transaction, and the events behind it.

In a source with transaction metadata, an event of a transaction stays in side state until the
transaction is complete. An event without a transaction that follows such an event in its partition
waits with it. Otherwise the earlier event would be applied after the later one. Any other event is
applied at once.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.sources.kafka.prepared import OFFSET, PARTITION, REASON, TOTAL_ORDER, TRANSACTION

__all__ = ["Held", "anchored", "held_in", "nowhere"]


class Held(NamedTuple):
    """Last waiting event of a partition: its offset, its transaction, and its order in that."""

    offset: int
    transaction: str
    total_order: int


def held_in(rows: pa.Table) -> dict[int, Held]:
    """Return, by partition, the last of rows that are or were in side state.

    The columns must be in the order of the side-state schema. Their names do not matter.
    """
    names, totals, _, partitions, offsets = rows.columns[:5]
    numbers, at = partitions.to_numpy(), offsets.to_numpy()
    found = {}
    for partition in np.unique(numbers).tolist():
        here = np.flatnonzero(numbers == partition)
        row = int(here[np.argmax(at[here])])
        found[partition] = Held(int(at[row]), names[row].as_py(), totals[row].as_py())
    return found


def anchored(table: pa.Table, held: dict[int, Held]) -> pa.Table:
    """Return the table with rows of no transaction assigned to the last waiting one before them.

    Updates `held` with the last waiting event of each partition.
    """
    partitions = table.column(PARTITION).to_numpy()
    bad = pc.is_valid(table.column(REASON)).to_numpy(zero_copy_only=False)
    owned = pc.is_valid(table.column(TRANSACTION)).to_numpy(zero_copy_only=False) & ~bad
    before = np.full(len(partitions), -1)
    for partition in np.unique(partitions).tolist():
        at = np.flatnonzero(partitions == partition)
        before[at] = np.maximum.accumulate(np.where(owned[at], at, -1))
    names = table.column(TRANSACTION).combine_chunks()
    totals = table.column(TOTAL_ORDER).combine_chunks()
    loose = ~owned & ~bad
    taken = pa.array(np.where(owned | bad, np.arange(len(partitions)), before), pa.int64())
    taken = pc.if_else(pa.array(loose & (before < 0)), pa.scalar(None, pa.int64()), taken)
    names, totals = names.take(taken), totals.take(taken)
    for partition, last in held.items():
        here = pa.array(loose & (before < 0) & (partitions == partition))
        names = pc.if_else(here, last.transaction, names)
        totals = pc.if_else(here, last.total_order, totals)
    for partition in np.unique(partitions[owned]).tolist():
        row = int(np.flatnonzero(owned & (partitions == partition))[-1])
        offset = table.column(OFFSET)[row].as_py()
        held[partition] = Held(offset, names[row].as_py(), totals[row].as_py())
    for name, column in ((TRANSACTION, names), (TOTAL_ORDER, totals)):
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def nowhere(values: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which events are in a transaction but have no order in it."""
    orders = [pc.is_null(values.column(name)) for name in ("total_order", "data_collection_order")]
    found = pc.and_(pc.is_valid(values.column("transaction")), pc.or_(*orders))
    lost: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    return lost
