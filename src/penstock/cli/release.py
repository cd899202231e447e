"""`penstock release`: give up a dead writer's lock."""

from penstock import persist
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.cli.rows import encode_line
from penstock.durable import normal
from penstock.persist.lake import storage_locations

__all__ = ["release"]


def release(location: Location, as_json: AsJson = False) -> None:
    """Release the writer's lock; a writer that lives after all is fenced and stops."""
    for url in map(normal, storage_locations(location)):
        holder = persist.release(url, settings=SETTINGS)
        if as_json:
            print(encode_line({"location": url, "released": None if holder is None else holder.id}))
        elif holder is None:
            print(f"{url}: no writer held the lock")
        else:
            print(
                f'{url}: released the lock of "{holder.id}", process {holder.pid} on {holder.host}'
            )
