"""Drop of a materialization: first its resources, then its holds, then its state.

The state is deleted last, so an interrupted drop can be run again. Each step is idempotent. The
last applied specification is stored for the deletion of its resources.

At deletion the collections may no longer exist, and the pipeline file may have changed.

The stored specification omits the endpoint config and the resource configs. Both contain
substituted variables, which may be secrets; the pipeline file still has them. A hash of each
resource config identifies it in the file. The resource path that the connector derived is
stored, because nothing else identifies the resource that was written.
"""

import base64
import hashlib
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from penstock import persist
from penstock.clock import Clock
from penstock.errors import UsageError
from penstock.failpoints import Failpoint, hit
from penstock.materialize.checkpoint import path_text
from penstock.materialize.connector_client import connect
from penstock.materialize.connector_process import resolve_connector
from penstock.materialize.inputs import hold_owner
from penstock.materialize.spec_builder import BuiltSpec, endpoint_of, resources_of
from penstock.persist.lake import storage_locations
from penstock.persist.state_store import StateStore
from penstock.pipeline import MaterializationSection
from penstock.protocol.messages import Apply
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.wire import decode, encode

__all__ = ["drop", "encode_applied", "load_applied", "load_applied_paths"]

STATE_KEY: Final = "applied"


def encode_applied(built: BuiltSpec) -> dict[str, Any]:
    """Return the state entry to store before Apply."""
    bindings = built.spec.bindings
    bare = tuple(replace(binding, resource_spec_json="{}") for binding in bindings)
    spec = encode(replace(built.spec, endpoint_spec_json="{}", bindings=bare))
    return {
        STATE_KEY: {
            "spec": base64.b64encode(spec).decode(),
            "version": built.version,
            "resources": [_hash(binding.resource_spec_json) for binding in bindings],
        }
    }


def load_applied_paths(store: StateStore) -> Collection[str]:
    """Return the resource paths of the last applied specification, as `path_text` writes them."""
    known = store.get(STATE_KEY)
    if known is None:
        return ()
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    return {path_text(binding.resource_path) for binding in spec.bindings}


def load_applied(
    store: StateStore, section: MaterializationSection
) -> tuple[MaterializationSpec, str] | None:
    """Return the last applied specification and its version; None before the first Apply.

    The endpoint config and the resource configs are read from `section`.

    Raises:
        UsageError: the section no longer has the config of a resource that was applied.
    """
    known = store.get(STATE_KEY)
    if known is None:
        return None
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    # Earlier releases stored the resource configs themselves.
    if "resources" in known:
        spec = _with_resources(spec, known["resources"], section)
    return replace(spec, endpoint_spec_json=endpoint_of(section)), known["version"]


def _with_resources(
    spec: MaterializationSpec, hashes: Sequence[str], section: MaterializationSection
) -> MaterializationSpec:
    configs = {_hash(config): config for config in resources_of(section)}
    bindings = []
    for binding, known in zip(spec.bindings, hashes, strict=True):
        if known not in configs:
            path = ".".join(binding.resource_path)
            raise UsageError(
                f'materialization "{spec.materialization}" has another config for resource '
                f'"{path}" than the applied one',
                detail="The applied config is not stored, because it may contain secrets. The "
                "connector needs it to delete the resource.",
                hint="Restore the config of the resource and its variables; or keep the resource: "
                "penstock drop --keep-target.",
            )
        bindings.append(replace(binding, resource_spec_json=configs[known]))
    return replace(spec, bindings=tuple(bindings))


def _hash(resource: str) -> str:
    return hashlib.sha256(resource.encode()).hexdigest()


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
    applied = load_applied(StateStore(client, name), section)
    if applied is not None and not keep_target:
        spec, version = applied
        with ExitStack() as stack:
            address, security = resolve_connector(stack, section.connector, clock)
            with connect(address, security) as connection:
                connection.delete(Apply(spec, version, False))
        hit(Failpoint.TARGET_DELETED)
    for url in storage_locations(location):
        with persist.open(url, hold=False) as reader:
            reader.drop_hold(hold_owner(name))
    hit(Failpoint.HOLD_DROPPED)
    client.destroy(*client.collections(hidden=True))
    # Only a writer deletes unused files, and this may be the last write to this location.
    client.compact()
    hit(Failpoint.DROP_DONE)
