"""The specification that was applied last, remembered so that it can be deleted.

Collections may be gone by then, and the file may say something else. What the endpoint is
reached by, and what is said of resources, is left out: variables were put into it, and
there may be secrets in it. The file has both; of a resource a hash is kept, by which it is
known again. The path that the connector made of it stays, as what was written is known
by nothing else.
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
    """What to write down before it is applied."""
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
    """Return the resources of the specification that was applied last, as in a checkpoint."""
    known = memory.get(NOTE)
    if known is None:
        return ()
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    return {path_text(each.resource_path) for each in spec.bindings}


def recall_applied(
    memory: StateStore, section: MaterializationSection
) -> tuple[MaterializationSpec, str] | None:
    """What was applied, and its version; None before anything was.

    Raises:
        UsageError: the section does not say any more what was said of a resource.
    """
    known = memory.get(NOTE)
    if known is None:
        return None
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    # Notes of earlier versions have the resources themselves.
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
