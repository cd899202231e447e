"""`penstock release`: give up a dead writer's lock."""

from penstock import persist
from penstock.catalog.rows import encode_line
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.durable import normal
from penstock.errors import UsageError
from penstock.persist.lake import open_store, storage_locations
from penstock.persist.machine import Machine
from penstock.persist.state import Writer

__all__ = ["release"]


def release(location: Location, as_json: AsJson = False) -> None:
    """Release the writer's lock; a writer that lives after all is fenced and stops."""
    urls = [*map(normal, storage_locations(location))]
    if len(urls) > 1:
        _check_one_is_locked(location, urls)
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


def _check_one_is_locked(location: str, urls: list[str]) -> None:
    """Not every writer of a lake dies at once, and those that live are not ours to stop."""
    holders = [(url, holder) for url in urls if (holder := _holder(url)) is not None]
    if len(holders) > 1:
        told = [f'{url} by "{each.id}", process {each.pid} on {each.host}' for url, each in holders]
        raise UsageError(
            f'lake "{location}" has {len(holders)} locked storage locations',
            detail=f"Locked are: {'; '.join(told)}.",
            hint=f"Release one by its own address, for example penstock release {holders[0][0]}",
        )


def _holder(url: str) -> Writer | None:
    blob = open_store(url, SETTINGS)
    try:
        return Machine(blob, SETTINGS).load().writer
    finally:
        blob.close()
