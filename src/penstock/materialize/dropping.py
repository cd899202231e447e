"""A materialization that is let go: its target, what it held back, what it remembered.

In that order. While its notes are there, a drop that was cut short is done again; and
each step finds out by itself that it was done.
"""

from contextlib import ExitStack

from penstock import persist
from penstock.clock import Clock
from penstock.failpoints import Failpoint, hit
from penstock.materialize.applied import recall_applied
from penstock.materialize.client import connect
from penstock.materialize.hosting import reached_connector
from penstock.materialize.lakeside import owner_of
from penstock.persist.lake import storage_locations
from penstock.persist.state_store import StateStore
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.messages import Apply

__all__ = ["drop"]


def drop(
    name: str,
    section: MaterializationSection,
    client: persist.Client,
    location: str,
    *,
    clock: Clock,
    keep_target: bool,
) -> None:
    """Let the connector delete what was applied, unless it is kept; then forget all of it.

    Raises:
        ConnectorError: the connector cannot be reached, or refuses. Nothing is forgotten.
    """
    applied = recall_applied(StateStore(client, name), section)
    if applied is not None and not keep_target:
        spec, version = applied
        with ExitStack() as stack:
            address, security = reached_connector(stack, section.connector, clock)
            with connect(address, security) as connection:
                connection.delete(Apply(spec, version, False))
        hit(Failpoint.TARGET_DELETED)
    for url in storage_locations(location):
        with persist.open(url, hold=False) as reader:
            reader.drop_hold(owner_of(name))
    hit(Failpoint.HOLD_DROPPED)
    client.destroy(*client.collections(hidden=True))
    # Nobody may ever write here again, and only a writer deletes what is not needed.
    client.compact()
    hit(Failpoint.DROP_DONE)
