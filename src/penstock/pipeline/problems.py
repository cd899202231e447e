"""What pydantic finds wrong with a file, as a person needs it: line, key, what would be valid.

No value is told: it may have come from a variable, and be a secret.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from penstock.errors import UsageError, similar
from penstock.pipeline.written import Written

__all__ = ["problems", "told"]

_NOUNS: Final = {
    "string_type": "text (quoted, if need be)",
    "string_too_short": "some text, or leave it out",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "literal_error": "{expected}",
    "greater_than_equal": "a number from {ge} on",
    "greater_than": "more than {gt}",
}
"""What would be valid, by pydantic's name for what is wrong."""


def problems(
    written: Written, error: ValidationError, schema: Mapping[str, Any]
) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yield line, key and problem, in a file that has `schema`.

    The text of a problem is `message; remedy`.
    """
    found: dict[tuple[str, ...], list[tuple[bool, str, str]]] = {}
    for each in error.errors(include_input=False, include_url=False):
        loc = tuple(map(str, each["loc"]))
        _, keys = written.place(loc)
        # Besides the file's own keys, a place names what it was taken for, of what it may be.
        taken = loc not in (keys, (*keys, "[key]"))
        if each["type"] == "missing":
            keys, taken = (*keys, loc[-1]), False
        noun, what = _said(keys, each, schema)
        found.setdefault(keys, []).append((taken, noun, what))
    for keys, said in found.items():
        inside = any(len(other) > len(keys) and other[: len(keys)] == keys for other in found)
        kept = [each for each in said if not (each[0] and inside)]
        nouns = dict.fromkeys(noun for _, noun, _ in kept if noun)
        sentences = [
            *(w for *_, w in kept if w),
            *([f"give {' or '.join(nouns)}"] if nouns else []),
        ]
        if nouns and len(sentences) == 1:
            sentences = ["this value is not accepted", *sentences]
        if sentences:
            yield written.place(keys)[0], keys, "; ".join(sentences)


def _said(
    keys: tuple[str, ...], each: Mapping[str, Any], schema: Mapping[str, Any]
) -> tuple[str, str]:
    """What would be valid, or a sentence about it."""
    match each["type"]:
        case "extra_forbidden":
            valid = _keys_at(keys[:-1], schema)
            close = similar(keys[-1], valid)
            meant = f'did you mean "{close[0]}"? ' if close else ""
            return "", f"there is no such key here; {meant}Valid keys are: {', '.join(valid)}"
        case "missing":
            return "", f'this key is missing; add "{keys[-1]}:"'
        case "string_pattern_mismatch":
            return "", (
                "this name is not accepted; a name has 1 to 63 letters, digits, _ and -, and "
                "begins with a letter or _"
            )
        case kind if kind in _NOUNS:
            return _NOUNS[kind].format(**each.get("ctx", {})), ""
        case _:
            return "", str(each["msg"]).removeprefix("Value error, ")


def _keys_at(keys: Sequence[str], root: Mapping[str, Any]) -> list[str]:
    """The keys that a mapping at `keys` may have."""

    def whole(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield schema
        if "$ref" in schema:
            yield from whole(root["$defs"][schema["$ref"].rpartition("/")[2]])
        for each in schema.get("anyOf", ()):
            yield from whole(each)

    def inside(schema: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
        if key in schema.get("properties", ()):
            yield schema["properties"][key]
        values = [*schema.get("patternProperties", {}).values()]
        values += [schema.get(name) for name in ("additionalProperties", "items")]
        for each in values:
            if isinstance(each, dict):
                yield each

    here: list[Mapping[str, Any]] = [root]
    for key in keys:
        here = [each for outer in here for part in whole(outer) for each in inside(part, key)]
    return [name for outer in here for part in whole(outer) for name in part.get("properties", ())]


def told(error: UsageError) -> ValueError:
    """An error of ours, for pydantic to put in its place."""
    hint = error.hint.removesuffix(".")
    return ValueError(f"{error}; {hint[:1].lower()}{hint[1:]}" if hint else str(error))
