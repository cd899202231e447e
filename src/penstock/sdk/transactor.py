"""The part of a connector that serves one open stream.

The SDK calls these methods in one thread, in this order:

    acknowledge ▸ load ▸ store ▸ start_commit ▸ acknowledge ▸ load ▸ …

They need no locks. Only `cancel` is called from another thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from penstock.protocol.messages import StateUpdate
from penstock.sdk.batches import Documents, Keys, LoadedDocuments
from penstock.sdk.errors import ContractBroken

__all__ = ["Transactor"]


class Transactor(ABC):
    """Writer of one key range, from Open to the end of the stream."""

    checkpoint: bytes = b""
    """Checkpoint of Opened. If empty, the runtime resumes from its recovery log."""

    accepts_empty: bool = False
    """True if `store` accepts batches with `empties`. Validate reports it for each binding."""

    def acknowledge(self) -> None:  # noqa: B027 - no-op if start_commit commits
        """Finish the last transaction, which is committed in the recovery log.

        This is also the first call of each stream, because the last transaction of an earlier
        stream may not be acknowledged. Staged documents must be applied, again if necessary.
        Loads arrive at the same time; the SDK buffers them until this method returns.
        """

    def load(self, keys: Iterator[Keys]) -> Iterator[LoadedDocuments]:
        """Yield the documents of `keys` that exist, as of the last commit.

        Consume all of `keys`: the iterator ends when the runtime has requested all keys. Bindings
        with delta updates are never loaded.
        """
        for batch in keys:
            raise ContractBroken(
                f"{type(self).__name__} does not implement load, needed for {batch.binding}"
            )
        yield from ()

    @abstractmethod
    def store(self, documents: Iterator[Documents]) -> None:
        """Store all of `documents`. They must not be visible before the commit."""

    @abstractmethod
    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Commit the stored documents together with `checkpoint`, or stage them.

        If the endpoint is authoritative, the transaction is committed when this method returns,
        or `Fenced` is raised and nothing is changed. Otherwise the method returns connector
        state, which the recovery log commits. `acknowledge` follows, in this transactor or,
        after a restart, in a transactor that was opened with that state.
        """

    def cancel(self) -> None:  # noqa: B027 - optional
        """Interrupt the method that runs in the other thread, at once.

        That method may raise any exception. `close` follows, or may run already.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Roll back the uncommitted transaction, and disconnect from the endpoint."""
