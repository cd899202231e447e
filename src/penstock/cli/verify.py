"""`penstock verify`: check every object of a storage location."""

import typer

from penstock.catalog import encode_line
from penstock.cli.options import SETTINGS, AsJson, Location
from penstock.persist.checksum_walk import verify as walk
from penstock.persist.lake import storage_locations
from penstock.persist.store import open_store

__all__ = ["verify"]


def verify(location: Location, as_json: AsJson = False) -> None:
    """Read and check every object, and list damaged objects.

    The exit status is 1 if an object is damaged.
    """
    sound = True
    for url in storage_locations(location):
        blob = open_store(url, SETTINGS)
        try:
            report = walk(blob)
        finally:
            blob.close()
        sound = sound and report.sound
        if as_json:
            damage = [{"object": entry.key, "reason": entry.reason} for entry in report.damage]
            print(
                encode_line(
                    {
                        "location": report.location,
                        "objects": report.objects,
                        "bytes": report.bytes,
                        "sound": report.sound,
                        "damage": damage,
                    }
                )
            )
            continue
        for entry in report.damage:
            print(f'damaged: object "{entry.key}" of location "{report.location}": {entry.reason}')
        verdict = "all sound" if report.sound else f"{len(report.damage)} damaged"
        print(f"{report.location}: {report.objects} objects, {report.bytes} bytes, {verdict}")
    if not sound:
        raise typer.Exit(1)
