"""`penstock release`: release the lock of a dead writer."""

from penstock import persist
from penstock.catalog import encode_line
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.durable import is_dead, normal
from penstock.errors import UsageError
from penstock.persist.lake import storage_locations
from penstock.persist.lock import owner_of

__all__ = ["release"]


def release(location: Location, as_json: AsJson = False) -> None:
    """Release the lock of a dead writer. A live writer is fenced and stops."""
    urls = [*map(normal, storage_locations(location))]
    if len(urls) > 1:
        urls = _urls_to_release(location, urls)
    for url in urls:
        holder = persist.release(url, settings=SETTINGS)
        if as_json:
            print(encode_line({"location": url, "released": None if holder is None else holder.id}))
        elif holder is None:
            print(f"{url}: no writer held the lock")
        else:
            print(
                f'{url}: released the lock of "{holder.id}", process {holder.pid} on {holder.host}'
            )


def _urls_to_release(location: str, urls: list[str]) -> list[str]:
    """Return the storage locations to release: those with dead writers, else the only locked one.

    A writer that may be alive is not stopped unless its location is given.
    """
    holders = [(url, holder) for url in urls if (holder := owner_of(url)) is not None]
    if dead := [url for url, holder in holders if is_dead(holder.process)]:
        return dead
    if len(holders) > 1:
        locks = [
            f'{url} by "{holder.id}", process {holder.pid} on {holder.host}'
            for url, holder in holders
        ]
        raise UsageError(
            f'lake "{location}" has {len(holders)} locked storage locations',
            detail=f"Locked: {'; '.join(locks)}.",
            hint=f"Release one of them by its URL, for example penstock release {holders[0][0]}",
        )
    return urls
