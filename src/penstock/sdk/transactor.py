"""What a connector does for one open stream.

The SDK calls these methods one after the other, in one thread, in this order:

    acknowledge ▸ load ▸ store ▸ start_commit ▸ acknowledge ▸ load ▸ …

so they are written as straight-line code, and hold no locks of their own. Only
`cancel` comes from another thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from penstock.protocol.messages import StateUpdate
from penstock.sdk.batches import Documents, Found, Keys
from penstock.sdk.errors import ContractBroken

__all__ = ["Transactor"]


class Transactor(ABC):
    """The writer of one range of keys, from Open to the end of the stream."""

    checkpoint: bytes = b""
    """What Opened says: go on after this. Empty: the recovery log knows better."""

    accepts_empty: bool = False
    """Whether `store` heeds batches with `empties`; Validate announces it of each binding."""

    def acknowledge(self) -> None:  # noqa: B027 - nothing, where commits are done when they return
        """The last transaction is committed in the recovery log, so finish it here.

        Called first of all, when nobody knows whether the last commit of an earlier
        stream was acknowledged: whatever was staged is to be applied, once more if
        need be. Loads are under way meanwhile; they are kept until this returns.
        """

    def load(self, keys: Iterator[Keys]) -> Iterator[Found]:
        """Yield the documents of `keys` that are there, as of the last commit.

        Take all of `keys`, at your own pace: it ends when the runtime has asked for
        everything. Bindings of delta updates are never asked for.
        """
        for each in keys:
            raise ContractBroken(
                f"{type(self).__name__} was asked to load from {each.binding}, and has no load"
            )
        yield from ()

    @abstractmethod
    def store(self, documents: Iterator[Documents]) -> None:
        """Store all of `documents`, of which nothing may be seen until it is committed."""

    @abstractmethod
    def start_commit(self, checkpoint: bytes) -> StateUpdate | None:
        """Commit what was stored, together with `checkpoint`, or make ready to.

        Where the endpoint is authoritative, it is committed when this returns, or
        `Fenced` is raised and nothing is changed. Else what is returned is connector
        state, which the recovery log commits; `acknowledge` follows, here or after a
        restart in a transactor that was opened with that state.
        """

    def cancel(self) -> None:  # noqa: B027 - not every connector has something to break off
        """Break off what another method is doing, at once; called by another thread.

        The method that is broken off raises whatever it likes. `close` follows, and may
        have begun already.
        """

    def close(self) -> None:  # noqa: B027 - nor to let go of
        """Roll back what is not committed, and let go of the endpoint."""
