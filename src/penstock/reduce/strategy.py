"""Reduction strategies, as a schema names them.

    reduce: {strategy: merge, key: [/id]}

An annotation is parsed once, with its schema. An unsupported option is an error, because an
ignored strategy would change the data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

from penstock.errors import UsageError
from penstock.reduce.document import Pointer, parse_pointer

__all__ = [
    "DEFAULT",
    "Append",
    "FirstWriteWins",
    "JsonSchemaMerge",
    "LastWriteWins",
    "Maximize",
    "Merge",
    "Minimize",
    "Set",
    "Strategy",
    "Sum",
    "parse_strategy",
]


@dataclass(frozen=True, slots=True)
class LastWriteWins:
    """Keep the right value."""

    name: ClassVar = "lastWriteWins"
    delete: bool = field(default=False, compare=False)
    """A full reduction removes the location."""
    associative: bool = True
    """If False, unequal values stay separate until a full reduction."""


@dataclass(frozen=True, slots=True)
class FirstWriteWins:
    """Keep the left value."""

    name: ClassVar = "firstWriteWins"


@dataclass(frozen=True, slots=True)
class Append:
    """Concatenate the left and the right array."""

    name: ClassVar = "append"


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum two numbers, or two strings that hold numbers, exactly."""

    name: ClassVar = "sum"


@dataclass(frozen=True, slots=True)
class Minimize:
    """Keep the lesser value; with a `key`, values with equal keys are merged."""

    name: ClassVar = "minimize"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class Maximize:
    """Keep the greater value; with a `key`, values with equal keys are merged."""

    name: ClassVar = "maximize"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge objects by name, and arrays by index, or by `key` if both are sorted by it."""

    name: ClassVar = "merge"
    key: tuple[Pointer, ...] = ()
    delete: bool = field(default=False, compare=False)
    """A full reduction removes the location."""


@dataclass(frozen=True, slots=True)
class Set:
    """Change a set: members to add, and members to remove or to retain before that."""

    name: ClassVar = "set"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonSchemaMerge:
    """Union of two JSON schemas."""

    name: ClassVar = "jsonSchemaMerge"


Strategy: TypeAlias = (
    LastWriteWins
    | FirstWriteWins
    | Append
    | Sum
    | Minimize
    | Maximize
    | Merge
    | Set
    | JsonSchemaMerge
)

DEFAULT: Final = LastWriteWins()


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f'option "{at}" is not a boolean', hint="Write true or false.")
    return value


def _key(value: Any, at: str) -> tuple[Pointer, ...]:
    if not isinstance(value, list) or not value:
        raise UsageError(
            f'option "{at}" is not a list of JSON pointers',
            hint='Write [""] for the whole value, or remove the key.',
        )
    return tuple(
        parse_pointer(pointer, what=f'option "{at}/{i}"') for i, pointer in enumerate(value)
    )


_Options: TypeAlias = Mapping[str, Callable[[Any, str], Any]]

_KNOWN: Final[Mapping[str, tuple[Callable[..., Strategy], _Options]]] = {
    "lastWriteWins": (LastWriteWins, {"delete": _flag, "associative": _flag}),
    "firstWriteWins": (FirstWriteWins, {}),
    "append": (Append, {}),
    "sum": (Sum, {}),
    "minimize": (Minimize, {"key": _key}),
    "maximize": (Maximize, {"key": _key}),
    "merge": (Merge, {"key": _key, "delete": _flag}),
    "set": (Set, {"key": _key}),
    "jsonSchemaMerge": (JsonSchemaMerge, {}),
}


def parse_strategy(annotation: Any, *, at: str) -> Strategy:
    """Parse the `reduce` annotation at the place `at` of its schema."""
    what = f'annotation "{at}"'
    name = annotation.get("strategy") if isinstance(annotation, dict) else None
    if not isinstance(name, str) or name not in _KNOWN:
        raise UsageError(
            f"{what} does not name a supported strategy",
            hint=f"Write {{strategy: name}} with one of {', '.join(_KNOWN)}.",
        )
    make, options = _KNOWN[name]
    unknown = annotation.keys() - options.keys() - {"strategy"}
    if unknown:
        allowed = f"Write one of: {', '.join(options)}." if options else "Remove the option."
        raise UsageError(
            f'option "{min(map(str, unknown))}" of {what} does not exist for {name}', hint=allowed
        )
    given: dict[str, Any] = {
        option: read(annotation[option], f"{at}/{option}")
        for option, read in options.items()
        if option in annotation
    }
    return make(**given)
