"""Drop of a materialization: first its resources, then its holds, then its state.

The state is deleted last, so an interrupted drop can be run again. Each step is idempotent.
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
    """Delete the applied resources unless `keep_target`, then the holds and the state.

    Raises:
        ConnectorError: the connector is unreachable, or rejects the deletion. All holds and all
            state remain.
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
    # Only a writer deletes unused files, and this may be the last write to this location.
    client.compact()
    hit(Failpoint.DROP_DONE)
