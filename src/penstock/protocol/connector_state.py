"""Connector state and its updates.

An update replaces the state or is a merge patch (RFC 7396). Combination is associative:

    combine(combine(a, b), c) = combine(a, combine(b, c))

For that, two patches combine into one patch, which retains nulls until it is applied to a state.
One case is an exception: no merge patch can remove a value and then put an object in its place.
If the first patch removes a value and the second puts an object there, the combined patch merges
the object with the removed value. Combining updates with the state in order avoids this case.
"""

import json
from typing import Any, Final

from penstock.errors import UsageError
from penstock.protocol.messages import StateUpdate

__all__ = ["EMPTY", "combine_state", "is_unchanged", "merge_patch"]

EMPTY: Final = StateUpdate(b"")
"""Connector state before the first update."""


def combine_state(state: StateUpdate, update: StateUpdate) -> StateUpdate:
    """Return the state, or the patch, that results from `update` after `state`.

    Raises:
        UsageError: a patch, or the state that it patches, is not a JSON object.
    """
    if not update.patch:
        return StateUpdate(update.json)
    if state.patch:
        return StateUpdate(_to_json(_combine_patches(_parse(state), _parse(update))), patch=True)
    return StateUpdate(_to_json(merge_patch(_parse(state) if state.json else {}, _parse(update))))


def merge_patch(target: Any, patch: Any) -> Any:
    """Return `target` with `patch` applied, by RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def is_unchanged(state: StateUpdate, update: StateUpdate) -> bool:
    """Return whether an update leaves the state as it is."""
    return bool(_parse(combine_state(state, update)) == _parse(state))


def _combine_patches(first: Any, second: Any) -> Any:
    """Return the patch that equals `first` followed by `second`."""
    if not isinstance(second, dict) or not isinstance(first, dict):
        return second
    result = dict(first)
    for name, value in second.items():
        result[name] = _combine_patches(result.get(name), value)
    return result


def _parse(state: StateUpdate) -> Any:
    try:
        content = json.loads(state.json) if state.json else {}
    except ValueError as error:
        raise UsageError("connector state is not JSON", detail=str(error)) from error
    if not isinstance(content, dict):
        raise UsageError("connector state is not a JSON object")
    return content


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
