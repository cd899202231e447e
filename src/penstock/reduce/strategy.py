"""The strategies by which two values at one location become one, as a schema names them.

    reduce: {strategy: merge, key: [/id]}

An annotation is read once, when the schema is; anything it says that we do not know is
an error there, because a strategy that is not followed changes the data.
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
    """The right one."""

    name: ClassVar = "lastWriteWins"
    delete: bool = field(default=False, compare=False)
    """The location is gone after a full reduction."""
    associative: bool = True
    """If not, unequal values wait side by side for a full reduction."""


@dataclass(frozen=True, slots=True)
class FirstWriteWins:
    """The left one."""

    name: ClassVar = "firstWriteWins"


@dataclass(frozen=True, slots=True)
class Append:
    """The items of the left array, then those of the right one."""

    name: ClassVar = "append"


@dataclass(frozen=True, slots=True)
class Sum:
    """Exactly the sum of two numbers, or of two strings that hold numbers."""

    name: ClassVar = "sum"


@dataclass(frozen=True, slots=True)
class Minimize:
    """The lesser one; by `key`, two that are equal are merged."""

    name: ClassVar = "minimize"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class Maximize:
    """The greater one; by `key`, two that are equal are merged."""

    name: ClassVar = "maximize"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class Merge:
    """Objects by name; arrays by index, or by `key` if both are in its order."""

    name: ClassVar = "merge"
    key: tuple[Pointer, ...] = ()
    delete: bool = field(default=False, compare=False)
    """The location is gone after a full reduction."""


@dataclass(frozen=True, slots=True)
class Set:
    """A change to a set: what to add, and what to remove or to keep before."""

    name: ClassVar = "set"
    key: tuple[Pointer, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonSchemaMerge:
    """A JSON schema that admits what either of two did."""

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
            hint='Write [""] for the whole value, or leave the key out.',
        )
    return tuple(parse_pointer(each, what=f'option "{at}/{i}"') for i, each in enumerate(value))


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
    """The strategy of a `reduce` annotation that stands at `at` in its schema."""
    what = f'annotation "{at}"'
    name = annotation.get("strategy") if isinstance(annotation, dict) else None
    if not isinstance(name, str) or name not in _KNOWN:
        raise UsageError(
            f"{what} names no strategy that is known",
            hint=f"Write {{strategy: name}} with one of {', '.join(_KNOWN)}.",
        )
    make, options = _KNOWN[name]
    unknown = annotation.keys() - options.keys() - {"strategy"}
    if unknown:
        allowed = f"Its options are {', '.join(options)}." if options else "It has no options."
        raise UsageError(
            f'{what} gives {name} the unknown option "{min(map(str, unknown))}"', hint=allowed
        )
    given: dict[str, Any] = {
        option: read(annotation[option], f"{at}/{option}")
        for option, read in options.items()
        if option in annotation
    }
    return make(**given)
