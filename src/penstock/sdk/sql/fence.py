"""Fences of streams: table `flow_checkpoints_v1`.

    materialization  key_begin  key_end │ fence  checkpoint

An Open increments the fence of every row whose key range overlaps its own, in one transaction. It
resumes from the checkpoint of the narrowest row that covers its range. A commit updates the
checkpoint only if the fence is unchanged. If no row matches, a newer stream has opened, and the
transaction is rolled back.

SUBTLE: after shards are split and joined again, a row that covers the joined range has the
checkpoint from before the split. Resuming there would repeat the transactions of the parts; with
no such row, everything would be repeated. A range counts as joined if rows lie inside it, and
these rows contain all its keys, or the range has a row of its own, or no row covers it. Then no
checkpoint is used, the recovery log decides, and the rows inside are deleted. A range also never
starts from zero if another stream has written some of its keys.

SUBTLE: the row that replaces deleted rows inherits their highest fence, and an Open inherits the
highest fence of the rows that cover its range. Otherwise a range that is split off again could
reach the fence number of a stream that hangs since before.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import Fenced
from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import START_FROM_ZERO
from penstock.sdk.sql.dialect import Dialect
from penstock.sdk.sql.session import Session

__all__ = ["TABLE", "Fence", "commit_fence", "create_checkpoints", "install_fence", "reset_fences"]

TABLE = "flow_checkpoints_v1"


@dataclass(frozen=True, slots=True)
class Fence:
    """Fence of one stream."""

    materialization: str
    key_range: KeyRange
    fence: int
    checkpoint: bytes
    """Checkpoint to resume from; empty if the recovery log decides."""


def create_checkpoints(dialect: Dialect, path: tuple[str, ...] = (TABLE,)) -> str:
    """Return the statement that creates the table."""
    return (
        f"CREATE TABLE IF NOT EXISTS {dialect.quoted_path(path)} (\n"
        "    materialization TEXT NOT NULL,\n"
        "    key_begin BIGINT NOT NULL,\n"
        "    key_end BIGINT NOT NULL,\n"
        "    fence BIGINT NOT NULL,\n"
        "    checkpoint TEXT NOT NULL,\n"
        "    PRIMARY KEY (materialization, key_begin, key_end)\n"
        ")"
    )


def install_fence(
    session: Session,
    dialect: Dialect,
    materialization: str,
    key_range: KeyRange,
    path: tuple[str, ...] = (TABLE,),
) -> Fence:
    """Fence all previous writers of these keys. Call it in a transaction."""
    table, name = dialect.quoted_path(path), materialization
    begin, end = key_range.begin, key_range.end
    where = "WHERE materialization = ? AND key_end >= ? AND key_begin <= ?"
    session.run(f"UPDATE {table} SET fence = fence + 1 {where}", [name, begin, end])
    rows = [
        _Row(KeyRange(first, last), fence, checkpoint)
        for first, last, fence, checkpoint in session.query(
            f"SELECT key_begin, key_end, fence, checkpoint FROM {table} {where}", [name, begin, end]
        )
    ]
    installed = _inherit(rows, key_range)
    if installed.joined:
        session.run(
            f"DELETE FROM {table} WHERE materialization = ? AND key_begin >= ? AND key_end <= ?",
            [name, begin, end],
        )
    if installed.joined or key_range not in (row.key_range for row in rows):
        session.run(
            f"INSERT INTO {table} (materialization, key_begin, key_end, fence, checkpoint) "
            "VALUES (?, ?, ?, ?, ?)",
            [name, begin, end, installed.fence, installed.checkpoint],
        )
    return Fence(name, key_range, installed.fence, base64.b64decode(installed.checkpoint))


@dataclass(frozen=True, slots=True)
class _Row:
    key_range: KeyRange
    fence: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class _Installed:
    fence: int
    checkpoint: str
    joined: bool = False


def _inherit(rows: Sequence[_Row], key_range: KeyRange) -> _Installed:
    """Return fence and checkpoint of a range, from the rows that it overlaps."""
    if not rows:
        return _Installed(1, _text(START_FROM_ZERO))
    highest = max(row.fence for row in rows)
    covering = [row for row in rows if row.key_range.covers(key_range)]
    inside = [
        row.key_range
        for row in rows
        if key_range.covers(row.key_range) and row.key_range != key_range
    ]
    if not covering:
        return _Installed(highest, "", joined=bool(inside))
    narrowest = min(covering, key=lambda row: row.key_range.width)
    exact = narrowest.key_range == key_range
    if inside and (exact or _cover(inside, key_range)):
        # The stale checkpoint is cleared: no stream may use it before this one commits.
        return _Installed(highest, "", joined=True)
    fence = narrowest.fence if exact else max(row.fence for row in covering)
    return _Installed(fence, narrowest.checkpoint)


def _cover(parts: Sequence[KeyRange], key_range: KeyRange) -> bool:
    """Return whether the parts contain every key of a range."""
    reached = key_range.begin
    for part in sorted(parts):
        if part.begin > reached:
            return False
        reached = max(reached, part.end + 1)
    return reached > key_range.end


def commit_fence(
    session: Session,
    dialect: Dialect,
    fence: Fence,
    checkpoint: bytes,
    path: tuple[str, ...] = (TABLE,),
    *,
    condition: str = "TRUE",
    parameters: Sequence[Any] = (),
) -> None:
    """Write a checkpoint if no newer stream has opened and the SQL `condition` holds.

    Call it last in a transaction.

    Raises:
        Fenced: no row was updated. The caller must roll back.
    """
    row_count = session.run(
        f"UPDATE {dialect.quoted_path(path)} SET checkpoint = ? "
        "WHERE materialization = ? AND key_begin = ? AND key_end = ? AND fence = ? "
        f"AND {condition}",
        [
            _text(checkpoint),
            fence.materialization,
            fence.key_range.begin,
            fence.key_range.end,
            fence.fence,
            *parameters,
        ],
    )
    if row_count != 1:
        raise Fenced(
            f'stream of materialization "{fence.materialization}" {fence.key_range} is fenced',
            detail="A newer stream was opened. This transaction is rolled back.",
            hint="Stop this process. The newer stream continues.",
        )


def reset_fences(
    session: Session, dialect: Dialect, materialization: str, path: tuple[str, ...] = (TABLE,)
) -> None:
    """Fence all streams, and reset their checkpoints to the beginning.

    The rows remain: if a fence started from one again, it could equal the fence of an older stream.
    """
    session.run(
        f"UPDATE {dialect.quoted_path(path)} SET fence = fence + 1, checkpoint = ? "
        "WHERE materialization = ?",
        [_text(START_FROM_ZERO), materialization],
    )


def _text(checkpoint: bytes) -> str:
    return base64.b64encode(checkpoint).decode()
