"""What a fresh process finds in a location when all is over."""

from penstock import persist
from penstock.durable import open_blob
from penstock.errors import PenstockError
from penstock.persist.paths import BATCHES
from tests.faults.history import Event, Recorder, note_final


def inspected(url: str) -> list[Event]:
    """The last events of a history: contents and damage, and whether it opens at all."""
    recorder = Recorder("inspector")
    try:
        with persist.open(url, hold=False) as client:
            note_final(recorder, client, open_blob(url))
    except PenstockError as error:
        recorder.note("damaged", error=repr(error), key=getattr(error, "key", ""))
    return recorder.events


def litter(url: str) -> list[str]:
    """Files that nothing links and nothing is about to, once a writer has compacted."""
    blob = open_blob(url)
    with persist.open(url, hold=False) as client:
        linked = client.state.linked()
    return [each.key for each in blob.list(BATCHES) if each.key not in linked]
