"""A pipeline's file as it was written: its values, and at which line each stands.

`${NAME}` in a value stands for an environment variable. It is put in after
parsing, so that what a variable holds cannot change what the file means.
`$${NAME}` stands for those characters themselves:

    interpolated(escaped(text)) == text
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import Problem, UsageError

__all__ = ["VARIABLE", "Missing", "Written", "escaped", "interpolated", "read", "value_in", "wrong"]

VARIABLE: Final = r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}"
_VARIABLE: Final = re.compile(rf"(\$?){VARIABLE}")

Keys = tuple[str, ...]

DEEPEST: Final = 100
"""So many levels a file may have: more than anybody means, and far from where Python ends."""

MOST: Final = 1_000_000
"""So many values a file may hold once its anchors are written out."""


@dataclass(frozen=True, slots=True)
class Written:
    """What is in a file."""

    path: Path
    content: dict[str, Any]
    """Its values, `${NAME}` as it stands."""

    document: yaml.Node
    """The same, with lines."""

    def place(self, keys: Sequence[str | int]) -> tuple[int, Keys]:
        """The line of what is at `keys`, and those of them that there are in the file."""
        node, line, found = self.document, self.document.start_mark.line + 1, list[str]()
        for key in map(str, keys):
            if (step := _step(node, key)) is not None:
                line, node = step
                found.append(key)
        return line, tuple(found)


@dataclass(frozen=True, slots=True)
class Missing:
    """A variable that is used and not set."""

    name: str
    keys: Keys


def read(path: Path) -> Written:
    """What is in the file at `path`.

    Raises:
        UsageError: it cannot be read, is not YAML or no mapping, has a key twice, is too deep
            or holds too much.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f'pipeline file "{path}" cannot be read', detail=f"{error}.", hint="Check the path."
        ) from error
    try:
        if (line := _too_deep(text)) is not None:
            raise wrong(path, [(line, (), f"this is more than {DEEPEST} levels deep")])
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
        if problems := list(_unclear(document, (), (), set())):
            raise wrong(path, problems)
        if document is not None and (much := _too_much(document)) is not None:
            too_much = f"its anchors stand for more than {MOST} values; write out what they mean"
            raise wrong(path, [(*much, too_much)])
        content = None if document is None else loader.construct_document(document)
    except yaml.YAMLError as error:
        # Its own words would quote the line, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"Line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or getattr(error, "reason", "it cannot be parsed")
        raise UsageError(
            f'pipeline file "{path}" is not YAML',
            detail=f"{where}{problem}.",
            hint="Mend its syntax.",
        ) from None
    if document is None or not isinstance(content, dict):
        raise UsageError(
            f'pipeline file "{path}" holds no mapping',
            hint="Begin with location: and sources:, as in the README.",
        )
    return Written(path, content, document)


def value_in(text: str) -> Any:
    """What a file of YAML or JSON says that has no variables, such as a schema.

    Raises:
        yaml.YAMLError: it is neither, is too deep or holds too much.
    """
    if (line := _too_deep(text)) is not None:
        raise yaml.YAMLError(f"line {line} is more than {DEEPEST} levels deep")
    loader = yaml.SafeLoader(text)
    document = loader.get_single_node()
    if document is not None and (found := _too_much(document)) is not None:
        raise yaml.YAMLError(f"the anchors of line {found[0]} stand for more than {MOST} values")
    return None if document is None else loader.construct_document(document)


def wrong(path: Path, problems: Sequence[tuple[int, Keys, str]]) -> UsageError:
    """Return the error about a file; each problem is line, key and `message; remedy`."""
    listed = [
        Problem(f"line {line}, {'.'.join(keys) or 'the file'}: {message}", hint=_sentence(remedy))
        for line, keys, text in sorted(problems, key=lambda problem: problem[0])
        for message, _, remedy in [text.partition("; ")]
    ]
    more = f", and {len(listed) - 1} more" if len(listed) > 1 else ""
    reference = "See docs/reference/pipeline-file.md for the values of each key."
    return UsageError(
        f'pipeline file "{path}" is wrong at {listed[0].message}{more}',
        hint=reference if more else f"{listed[0].hint} {reference}".strip(),
        problems=listed,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}." if text else ""


def escaped(value: Any) -> Any:
    """`value`, such that `interpolated` gives it back."""
    match value:
        case dict():
            return {key: escaped(inner) for key, inner in value.items()}
        case list():
            return [escaped(inner) for inner in value]
        case str():
            return _VARIABLE.sub(r"$\g<0>", value)
        case _:
            return value


def interpolated(
    value: Any, environment: Mapping[str, str], missing: list[Missing], at: Keys = ()
) -> Any:
    """`value` with what its variables stand for; those that are not set are added to `missing`."""

    def meant(found: re.Match[str]) -> str:
        mark, name = found.groups()
        if mark:
            return found[0].removeprefix(mark)
        if name not in environment:
            missing.append(Missing(name, at))
        return environment.get(name, "")

    match value:
        case dict():
            return {
                key: interpolated(inner, environment, missing, (*at, str(key)))
                for key, inner in value.items()
            }
        case list():
            return [
                interpolated(inner, environment, missing, (*at, str(n)))
                for n, inner in enumerate(value)
            ]
        case str():
            return _VARIABLE.sub(meant, value)
        case _:
            return value


def _too_deep(text: str) -> int | None:
    """The line at which there are too many levels; None if there is none."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST:
                return event.start_mark.line + 1 if event.start_mark is not None else 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _too_much(document: yaml.Node) -> tuple[int, Keys] | None:
    """Line and keys of what is too much once it is written out; None if nothing is."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MOST + 1  # For whoever holds itself.
            sizes[id(node)] = 1 + sum(size(each) for _, _, each in _inside(node))
        return sizes[id(node)]

    if size(document) <= MOST:
        return None
    node, line, keys = document, document.start_mark.line + 1, Keys()
    for _ in range(DEEPEST):
        step = next((each for each in _inside(node) if size(each[2]) > MOST), None)
        if step is None:
            break
        line, keys, node = step[0], (*keys, step[1]), step[2]
    return line, keys


def _inside(node: yaml.Node) -> list[tuple[int, str, yaml.Node]]:
    """What a node holds: each with its line and its key."""
    if isinstance(node, yaml.SequenceNode):
        return [(each.start_mark.line + 1, str(n), each) for n, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return [(name.start_mark.line + 1, str(name.value), each) for name, each in node.value]
    return []


def _step(node: yaml.Node, key: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        # What was merged in stands before a mapping's own keys, which win.
        for name, value in reversed(node.value):
            if name.value == key:
                return name.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        found = node.value[int(key)]
        return found.start_mark.line + 1, found
    return None


def _unclear(
    node: yaml.Node | None, keys: Keys, above: tuple[yaml.Node, ...], seen: set[int]
) -> Iterator[tuple[int, Keys, str]]:
    """Keys that are there twice, and what an anchor puts into itself."""
    if any(node is each for each in above):
        yield above[-1].start_mark.line + 1, keys, "an anchor holds itself; write out what it means"
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    inner: list[tuple[str, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        inner = [(str(n), each) for n, each in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for name, each in node.value:
            line, key = name.start_mark.line + 1, str(name.value)
            if (name.tag, key) in lines:
                first = lines[name.tag, key]
                yield line, (*keys, key), f"this key is there already, at line {first}"
            lines.setdefault((name.tag, key), line)
            inner.append((key, each))
    for key, each in inner:
        yield from _unclear(each, (*keys, key), (*above, node), seen)
