"""Connector state, and how updates of it add up.

An update replaces what is there, or patches it (RFC 7396). Of three updates it does
not matter which two are added first, so a patch onto a patch stays one, and keeps its
nulls until there is something that they can be taken from. There is one exception: no
patch says "remove this, and then put an object there", so what the second patch puts
where the first removes is merged with what was there. Add updates to the state as they
come, and it does not arise.
"""

import json
from typing import Any, Final

from penstock.errors import UsageError
from penstock.protocol.messages import StateUpdate

__all__ = ["EMPTY", "add_up", "merged", "unchanged"]

EMPTY: Final = StateUpdate(b"")
"""Nothing is known yet."""


def add_up(state: StateUpdate, update: StateUpdate) -> StateUpdate:
    """`state`, and then `update`.

    Raises:
        UsageError: a patch, or what it is to be applied to, is not a JSON object.
    """
    if not update.patch:
        return StateUpdate(update.json)
    if state.patch:
        return StateUpdate(_dumped(_patch_of_both(_loaded(state), _loaded(update))), patch=True)
    return StateUpdate(_dumped(merged(_loaded(state) if state.json else {}, _loaded(update))))


def merged(target: Any, patch: Any) -> Any:
    """`target` with `patch` applied, as RFC 7396 has it."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


def unchanged(state: StateUpdate, update: StateUpdate) -> bool:
    """Whether the update says nothing that is not said already."""
    return bool(_loaded(add_up(state, update)) == _loaded(state))


def _patch_of_both(first: Any, second: Any) -> Any:
    """One patch that does what both do, one after the other."""
    if not isinstance(second, dict) or not isinstance(first, dict):
        return second
    found = dict(first)
    for name, value in second.items():
        found[name] = _patch_of_both(found.get(name), value)
    return found


def _loaded(state: StateUpdate) -> Any:
    try:
        found = json.loads(state.json) if state.json else {}
    except ValueError as error:
        raise UsageError("connector state is not JSON", detail=str(error)) from error
    if not isinstance(found, dict):
        raise UsageError("connector state is not a JSON object")
    return found


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
