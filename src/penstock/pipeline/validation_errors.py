"""Validation errors of pydantic as line, key and valid form.

A message never contains a value, which can be a secret from a variable.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from penstock.errors import UsageError, similar
from penstock.pipeline.yaml_text import YamlText

__all__ = ["to_value_error", "validation_problems"]

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
"""Valid form, by error type of pydantic."""


def validation_problems(
    yaml_text: YamlText, error: ValidationError, schema: Mapping[str, Any]
) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yield line, key and problem, in a file that has `schema`.

    The text of a problem is `message; remedy`.
    """
    by_keys: dict[tuple[str, ...], list[tuple[bool, str, str]]] = {}
    for detail in error.errors(include_input=False, include_url=False):
        loc = tuple(map(str, detail["loc"]))
        _, keys = yaml_text.place(loc)
        # The location also contains the variant that pydantic tried, which is no key of the file.
        is_variant = loc not in (keys, (*keys, "[key]"))
        if detail["type"] == "missing":
            keys, is_variant = (*keys, loc[-1]), False
        noun, what = _describe(keys, detail, schema)
        by_keys.setdefault(keys, []).append((is_variant, noun, what))
    for keys, entries in by_keys.items():
        inside = any(len(other) > len(keys) and other[: len(keys)] == keys for other in by_keys)
        relevant = [detail for detail in entries if not (detail[0] and inside)]
        nouns = dict.fromkeys(noun for _, noun, _ in relevant if noun)
        sentences = [
            *(w for *_, w in relevant if w),
            *([f"give {' or '.join(nouns)}"] if nouns else []),
        ]
        if nouns and len(sentences) == 1:
            sentences = ["this value is not accepted", *sentences]
        if sentences:
            yield yaml_text.place(keys)[0], keys, "; ".join(sentences)


def _describe(
    keys: tuple[str, ...], detail: Mapping[str, Any], schema: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the valid form, or a message."""
    match detail["type"]:
        case "extra_forbidden":
            valid = _keys_at(keys[:-1], schema)
            close = similar(keys[-1], valid)
            suggestion = f'did you mean "{close[0]}"? ' if close else ""
            return "", f"there is no such key here; {suggestion}Valid keys are: {', '.join(valid)}"
        case "missing":
            return "", f'this key is missing; add "{keys[-1]}:"'
        case "string_pattern_mismatch":
            return "", (
                "this name is not accepted; a name has 1 to 63 letters, digits, _ and -, and "
                "begins with a letter or _"
            )
        case kind if kind in _NOUNS:
            return _NOUNS[kind].format(**detail.get("ctx", {})), ""
        case _:
            return "", str(detail["msg"]).removeprefix("Value error, ")


def _keys_at(keys: Sequence[str], root: Mapping[str, Any]) -> list[str]:
    """Return the valid keys of the mapping at `keys`."""

    def expand(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield schema
        if "$ref" in schema:
            yield from expand(root["$defs"][schema["$ref"].rpartition("/")[2]])
        for inner in schema.get("anyOf", ()):
            yield from expand(inner)

    def children(schema: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
        if key in schema.get("properties", ()):
            yield schema["properties"][key]
        values = [*schema.get("patternProperties", {}).values()]
        values += [schema.get(name) for name in ("additionalProperties", "items")]
        for inner in values:
            if isinstance(inner, dict):
                yield inner

    schemas: list[Mapping[str, Any]] = [root]
    for key in keys:
        schemas = [
            inner for outer in schemas for part in expand(outer) for inner in children(part, key)
        ]
    return [
        name for outer in schemas for part in expand(outer) for name in part.get("properties", ())
    ]


def to_value_error(error: UsageError) -> ValueError:
    """Convert a UsageError to the ValueError that pydantic expects."""
    hint = error.hint.removesuffix(".")
    return ValueError(f"{error}; {hint[:1].lower()}{hint[1:]}" if hint else str(error))
