"""The last applied specification, stored for the deletion of its resources.

At deletion the collections may no longer exist, and the pipeline file may have changed.

The stored specification omits the endpoint config and the resource configs. Both contain
substituted variables, which may be secrets; the pipeline file still has them. A hash of each
resource config identifies it in the file. The resource path that the connector derived is
stored, because nothing else identifies the resource that was written.
"""

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.errors import UsageError
from penstock.materialize.building import Built, endpoint_of, resources_of
from penstock.materialize.checkpoint import path_text
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.wire import decode, encode
from penstock.sources.source import StateStore

__all__ = ["applied_paths", "note_of_applied", "recall_applied"]

NOTE: Final = "applied"


def note_of_applied(built: Built) -> dict[str, Any]:
    """Return the state entry to store before Apply."""
    bindings = built.spec.bindings
    bare = tuple(replace(each, resource_spec_json="{}") for each in bindings)
    spec = encode(replace(built.spec, endpoint_spec_json="{}", bindings=bare))
    return {
        NOTE: {
            "spec": base64.b64encode(spec).decode(),
            "version": built.version,
            "resources": [_hash(each.resource_spec_json) for each in bindings],
        }
    }


def applied_paths(memory: StateStore) -> Collection[str]:
    """Return the resource paths of the last applied specification, as `path_text` writes them."""
    known = memory.get(NOTE)
    if known is None:
        return ()
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    return {path_text(each.resource_path) for each in spec.bindings}


def recall_applied(
    memory: StateStore, section: MaterializationSection
) -> tuple[MaterializationSpec, str] | None:
    """Return the last applied specification and its version; None before the first Apply.

    The endpoint config and the resource configs are read from `section`.

    Raises:
        UsageError: the section no longer has the config of a resource that was applied.
    """
    known = memory.get(NOTE)
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
    said = {_hash(each): each for each in resources_of(section)}
    bindings = []
    for binding, known in zip(spec.bindings, hashes, strict=True):
        if known not in said:
            path = ".".join(binding.resource_path)
            raise UsageError(
                f'materialization "{spec.materialization}" says something else of resource '
                f'"{path}" than when it was applied',
                detail="What was said is not kept, as there may be secrets in it; without it the "
                "connector cannot delete the resource.",
                hint="Put the resource, and the variables in it, back as they were; or keep what "
                "was written: penstock drop --keep-target.",
            )
        bindings.append(replace(binding, resource_spec_json=said[known]))
    return replace(spec, bindings=tuple(bindings))


def _hash(resource: str) -> str:
    return hashlib.sha256(resource.encode()).hexdigest()
