"""Inspection of a location by a new process at the end of a history."""

from penstock import persist
from penstock.durable import open_blob
from penstock.errors import PenstockError
from penstock.persist.paths import BATCHES
from tests.faults.history import Event, Recorder, note_final


def inspected(url: str) -> list[Event]:
    """Return the last events of a history: contents and damage, or the failure to open."""
    recorder = Recorder("inspector")
    try:
        with persist.open(url, hold=False) as client:
            note_final(recorder, client, open_blob(url))
    except PenstockError as error:
        recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
    return recorder.events


def litter(url: str) -> list[str]:
    """Return batch files that no collection links, after a writer has compacted."""
    blob = open_blob(url)
    with persist.open(url, hold=False) as client:
        linked = client.state.linked()
    return [each.key for each in blob.list(BATCHES) if each.key not in linked]
