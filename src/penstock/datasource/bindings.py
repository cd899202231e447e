"""What this format does not read: the bindings of a source.

Progress is a view that no collection holds, and the counts of a remap are
offsets: rows repeated as often as they say would be as many as there are bytes
in a source's log. `penstock.spark.read` shows both as what they are.
"""

from contextlib import closing

from penstock.errors import UsageError
from penstock.ingest.relations import find_bindings
from penstock.persist import Settings

__all__ = ["refuse_bindings"]


def refuse_bindings(location: str, name: str, *, settings: Settings) -> None:
    """Say what a name means, if it is one of a source's bindings.

    Raises:
        UsageError: it is.
    """
    found = find_bindings(location, name, hold=False, settings=settings)
    if found is None:
        return
    client, bindings = found
    with closing(client):
        what = "the progress" if bindings.derived else "the bindings"
        raise UsageError(
            f'"{name}" holds {what} of a source and cannot be read with format("penstock")',
            detail="It is derived from the source's remap; there is no collection of that name."
            if bindings.derived
            else "Its counts are offsets; each row would be there that often.",
            hint="Read it with penstock.spark.read, or what changed with penstock.spark.changes.",
        )
