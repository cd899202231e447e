"""Streams from a server: changes of a slot, and rows of a COPY.

    with ReplicationStream(connection, slot="s", start=lsn, publications=["p"]) as stream:
        while True:
            chunk = stream.read(timeout_s=1)     # None if nothing arrived
            …
            stream.confirm(durable)              # from any thread

Data that arrived before an error is returned before the error is raised.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, Self

import numpy as np

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.data.jit import Bytes
from penstock.errors import SourceError, TransientError, UsageError
from penstock.pgclient import Connection, quote_identifier, quote_literal
from penstock.sources.postgres import pgoutput_kernels as kernels
from penstock.sources.postgres.lsn import Lsn
from penstock.sources.postgres.pgoutput import CAPACITY, SPARE, Chunk, Decoder, Frame, damaged
from penstock.sources.postgres.wire import open_wire, parse_error_fields

__all__ = ["CopyStream", "ReplicationStream"]

STEP: Final = 256 << 10
"""Bytes per scan step: large enough for few calls, small enough to stay in the CPU cache."""


class ReplicationStream:
    """Transactions of a slot, in commit order."""

    def __init__(
        self,
        connection: Connection,
        *,
        slot: str,
        start: Lsn,
        publications: Sequence[str],
        binary: bool = False,
        messages: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        capacity: int = CAPACITY,
    ) -> None:
        """Start with transactions whose commit record begins at `start` or later.

        SUBTLE: if `start` is below the confirmed LSN of the slot, the server silently starts
        at the confirmed LSN. Compare the two before the call.

        Raises:
            SourceError: the server rejected the command; the SQLSTATE gives the reason.
        """
        if not connection.replication:
            raise UsageError(f"connection to {connection.where} is not a replication connection")
        self.confirmed = Lsn(0)
        """Greatest LSN confirmed by this stream."""

        timeout = connection.query(
            "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
        )
        self.server_timeout_ms = int(timeout[0][0] or 0)
        """Silence in milliseconds after which the server ends the connection; 0 for no limit."""

        self._connection = connection
        self._clock = clock
        self._decoder = Decoder(capacity)
        self._step = min(STEP, capacity // 4)
        self._failed: SourceError | None = None
        self._wire = open_wire(connection, naps=True)
        self._wire.begin(
            start_replication(
                slot=slot, start=start, publications=publications, binary=binary, messages=messages
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, timeout_s: float) -> Chunk | None:
        """Return received data: up to a full buffer, or until the server pauses.

        The call returns about `timeout_s` seconds after its start at the latest, with the data
        received by then, or None. A chunk may have no rows: keepalives count as data.

        Raises:
            SourceError: the server reported an error, or the connection is lost.
        """
        until = self._clock.boot_ms() + int(timeout_s * 1_000)
        decoder, wire = self._decoder, self._wire
        if self._failed is None:
            try:
                self._scan()
                while not decoder.full and self._failed is None:
                    count = wire.receive(decoder.space())
                    decoder.filled(count)
                    if not count or decoder.unscanned >= self._step:
                        self._scan()
                    left_ms = until - self._clock.boot_ms()
                    if left_ms <= 0 or (not count and decoder.scanned):
                        break
                    if not count:
                        wire.wait(left_ms / 1_000)
                self._scan()
            except SourceError as error:
                # The server's own error message may be among the bytes already received.
                with contextlib.suppress(SourceError):
                    self._scan()
                self._fail(error)
        chunk = decoder.take()
        if chunk is None and self._failed is not None:
            raise self._failed
        return chunk

    def confirm(self, flush: Lsn, *, reply: bool = False) -> None:
        """Confirm that changes before `flush` are durable. Safe from another thread.

        The confirmed position never decreases: a lower `flush` repeats the greatest one. With
        `reply`, the server responds with a keepalive at once.
        """
        if reply:
            self._connection.watch.expect_answer()
        self.confirmed = max(self.confirmed, flush)
        position = self.confirmed.position.to_bytes(8)
        now_us = self._clock.now_ms() * 1_000 - kernels.EPOCH_US
        self._wire.send(b"r" + position * 3 + now_us.to_bytes(8, signed=True) + bytes([reply]))

    def close(self) -> None:
        """End the stream, and close the connection. Safe to call twice."""
        self._wire.end()
        self._connection.close()

    def _scan(self) -> None:
        while self._failed is None and (frame := self._decoder.scan()) is not None:
            if (error := _frame_error(self._connection, frame)) is not None:
                self._fail(error)
            elif frame.kind == b"c":
                self._fail(
                    TransientError(
                        f"{self._connection.where} ended the stream",
                        detail="A server ends its streams when it is stopped.",
                    )
                )

    def _fail(self, error: SourceError) -> None:
        # The first error gives the cause; later errors are consequences.
        self._failed = self._failed or error


class CopyStream:
    """Output of COPY … TO STDOUT, in large blocks.

    A block contains complete CopyData frames. The server currently sends one row per frame,
    but the protocol does not guarantee it, so a reader must carry over partial rows.
    """

    def __init__(self, connection: Connection, sql: str, *, capacity: int = CAPACITY) -> None:
        """Start the COPY. The connection is usable again after the last block.

        Raises:
            SourceError: the server rejected the statement.
        """
        self._connection = connection
        self._capacity = capacity
        self._spare = min(SPARE, capacity // 4)
        self._buffer: Bytes = np.empty(capacity, np.uint8)
        self._block_end = self._scanned = self._end = 0
        self._failed: SourceError | None = None
        self._done = False
        self._wire = open_wire(connection)
        self._wire.begin(sql)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Bytes]:
        while (block := self.read()) is not None:
            yield block

    def read(self) -> Bytes | None:
        """Return the next block, owned by the caller, or None after the last.

        Raises:
            SourceError: the server reported an error, or the connection is lost.
        """
        try:
            while not self._done and not (self._block_end and self._free_bytes < self._spare):
                if self._free_bytes == 0:
                    self._renew(0)
                if count := self._wire.receive(self._buffer.data[self._end :]):
                    self._end += count
                    self._strip()
                else:
                    self._wire.wait(60)
        except SourceError as error:
            self._failed = self._failed or error
        if self._failed is not None:
            self.close()
            raise self._failed
        if self._block_end == 0:
            return None
        block = self._buffer[: self._block_end]
        self._renew(self._scanned)
        return block

    def close(self) -> None:
        """Stop. Before the end of the COPY, also close the connection to stop the server."""
        self._wire.end()
        if not self._done:
            self._connection.close()

    @property
    def _free_bytes(self) -> int:
        return len(self._buffer) - self._end

    def _strip(self) -> None:
        while True:
            self._scanned, self._block_end, frame_bytes = kernels.strip(
                self._buffer, self._scanned, self._end, self._block_end
            )
            if frame_bytes < 0:
                raise damaged(kernels.REASONS[kernels.BAD_LENGTH], b"")
            if self._end - self._scanned < max(frame_bytes, 5):
                return
            body = self._buffer[self._scanned + 5 : self._scanned + frame_bytes].tobytes()
            frame = Frame(self._buffer[self._scanned : self._scanned + 1].tobytes(), body)
            self._scanned += frame_bytes
            if (error := _frame_error(self._connection, frame)) is not None:
                self._failed = error
            if frame.kind == b"Z":
                self._done = True
                self._wire.end()

    def _renew(self, start: int) -> None:
        """Allocate a new buffer that begins with the bytes from `start` on."""
        kept_bytes = self._end - start
        buffer: Bytes = np.empty(max(self._capacity, 2 * kept_bytes), np.uint8)
        buffer[:kept_bytes] = self._buffer[start : self._end]
        self._buffer, self._end = buffer, kept_bytes
        if start:
            self._scanned = self._block_end = 0


def start_replication(
    *, slot: str, start: Lsn, publications: Sequence[str], binary: bool, messages: bool
) -> str:
    """Return the command that starts replication."""
    # SUBTLE: quoted twice: each name as an identifier, and the list as a literal.
    names = ",".join(map(quote_identifier, publications))
    options = {"proto_version": "1", "publication_names": names}
    if binary:
        options["binary"] = "true"
    if messages:
        options["messages"] = "true"
    listed = ", ".join(f"{name} {quote_literal(value)}" for name, value in options.items())
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {start} ({listed})"


def _frame_error(connection: Connection, frame: Frame) -> SourceError | None:
    """Return the error that a frame without data reports, or None."""
    match frame.kind:
        case b"E":
            return connection.server_error(parse_error_fields(frame.body))
        case b"N" | b"S" | b"A" | b"C" | b"c" | b"Z":  # notices, settings, and the end
            return None
        case _:
            return damaged(f"frame type {frame.kind!r} is not valid", frame.body[:64])
