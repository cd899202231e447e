"""The store of one storage location, opened with retries."""

from penstock.durable import PASSED, Blob, RetryingBlob, children, join, open_blob
from penstock.errors import UsageError
from penstock.persist.settings import Settings

__all__ = ["check_not_a_lake", "open_store"]


def open_store(url: str, settings: Settings, *, writing: bool = False) -> RetryingBlob:
    """Return the store of one storage location, with the retries that `settings` configure."""
    return RetryingBlob(
        open_blob(url, writing=writing),
        settings.clock,
        settings.chance,
        patience_ms=settings.patience_ms,
        stop=settings.stop,
    )


def check_not_a_lake(url: str, blob: Blob) -> None:
    """Reject opening a lake as a storage location. `blob` is the store at `url`.

    If `url` was written to before, this costs one read.

    Raises:
        UsageError: a folder directly below `url` is a storage location, and `url` is not.
    """
    if blob.get(PASSED) is not None:
        return
    for name in children(url):
        if blob.get(f"{name}/{PASSED}") is not None:
            raise UsageError(
                f'location "{url}" is a lake and cannot be written to itself',
                detail=f'Its folder "{name}" is a storage location.',
                hint=f"Open one of its storage locations, for example {join(url, name)}.",
            )
