"""The specification that was applied last, remembered so that it can be deleted.

Collections may be gone by then, and the file may say something else. What the endpoint is
reached by is left out, as there may be secrets in it; the file has it.
"""

import base64
from dataclasses import replace
from typing import Any, Final

from penstock.materialize.building import Built, endpoint_of
from penstock.pipeline.file import MaterializationSection
from penstock.protocol.specs import MaterializationSpec
from penstock.protocol.wire import decode, encode
from penstock.sources.source import Memory

__all__ = ["note_of_applied", "recall_applied"]

NOTE: Final = "applied"


def note_of_applied(built: Built) -> dict[str, Any]:
    """What to write down before it is applied."""
    spec = encode(replace(built.spec, endpoint_spec_json="{}"))
    return {NOTE: {"spec": base64.b64encode(spec).decode(), "version": built.version}}


def recall_applied(
    memory: Memory, section: MaterializationSection
) -> tuple[MaterializationSpec, str] | None:
    """What was applied, and its version; None before anything was."""
    known = memory.recall(NOTE)
    if known is None:
        return None
    spec = decode(MaterializationSpec, base64.b64decode(known["spec"]))
    return replace(spec, endpoint_spec_json=endpoint_of(section)), known["version"]
