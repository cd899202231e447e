"""The text of a pipeline file: its values, with their lines.

`${NAME}` in a value stands for an environment variable. Variables are substituted after
parsing, so the value of a variable cannot change the structure of the file. `$${NAME}` stands
for the characters themselves:

    substitute(escape(text)) == text
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.errors import Problem, UsageError

__all__ = [
    "VARIABLE",
    "UnsetVariable",
    "YamlText",
    "escape",
    "invalid_file_error",
    "parse_value",
    "read_yaml",
    "substitute",
]

VARIABLE: Final = r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}"
_VARIABLE: Final = re.compile(rf"(\$?){VARIABLE}")

Keys = tuple[str, ...]

MAX_DEPTH: Final = 100
"""Limit of nesting, far below the recursion limit of Python."""

MAX_VALUES: Final = 1_000_000
"""Limit of the values after the expansion of anchors."""


@dataclass(frozen=True, slots=True)
class YamlText:
    """A parsed YAML file."""

    path: Path
    content: dict[str, Any]
    """Values of the file, with variables unresolved."""

    document: yaml.Node
    """Node tree of the same content, with lines."""

    def place(self, keys: Sequence[str | int]) -> tuple[int, Keys]:
        """Return the line of the value at `keys`, and the keys that exist in the file."""
        node, line, known = self.document, self.document.start_mark.line + 1, list[str]()
        for key in map(str, keys):
            if (child := _child(node, key)) is not None:
                line, node = child
                known.append(key)
        return line, tuple(known)


@dataclass(frozen=True, slots=True)
class UnsetVariable:
    """A variable that the file uses and the environment does not set."""

    name: str
    keys: Keys


def read_yaml(path: Path) -> YamlText:
    """Read a pipeline file.

    Raises:
        UsageError: The file cannot be read, is not YAML, is not a mapping, has a duplicate key,
            or exceeds a limit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f'pipeline file "{path}" cannot be read', detail=f"{error}.", hint="Check the path."
        ) from error
    try:
        if (line := _line_too_deep(text)) is not None:
            raise invalid_file_error(
                path, [(line, (), f"this is more than {MAX_DEPTH} levels deep")]
            )
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
        if problems := list(_ambiguities(document, (), (), set())):
            raise invalid_file_error(path, problems)
        if document is not None and (place := _place_too_large(document)) is not None:
            message = (
                f"its anchors stand for more than {MAX_VALUES} values; write them without anchors"
            )
            raise invalid_file_error(path, [(*place, message)])
        content = None if document is None else loader.construct_document(document)
    except yaml.YAMLError as error:
        # The message of the parser quotes the line, which can contain a password.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"Line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or getattr(
            error, "reason", "the text cannot be parsed"
        )
        raise UsageError(
            f'pipeline file "{path}" is not YAML',
            detail=f"{where}{problem}.",
            hint="Correct the YAML syntax.",
        ) from None
    if document is None or not isinstance(content, dict):
        raise UsageError(
            f'pipeline file "{path}" is not a mapping',
            hint="Start with location: and sources:, as in the README.",
        )
    return YamlText(path, content, document)


def parse_value(text: str) -> Any:
    """Parse a YAML or JSON text without variables, such as a schema.

    Raises:
        yaml.YAMLError: The text is invalid or exceeds a limit.
    """
    if (line := _line_too_deep(text)) is not None:
        raise yaml.YAMLError(f"line {line} is more than {MAX_DEPTH} levels deep")
    loader = yaml.SafeLoader(text)
    document = loader.get_single_node()
    if document is not None and (place := _place_too_large(document)) is not None:
        raise yaml.YAMLError(
            f"the anchors of line {place[0]} stand for more than {MAX_VALUES} values"
        )
    return None if document is None else loader.construct_document(document)


def invalid_file_error(path: Path, problems: Sequence[tuple[int, Keys, str]]) -> UsageError:
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


def escape(value: Any) -> Any:
    """Escape variables: the inverse of `substitute`."""
    match value:
        case dict():
            return {key: escape(inner) for key, inner in value.items()}
        case list():
            return [escape(inner) for inner in value]
        case str():
            return _VARIABLE.sub(r"$\g<0>", value)
        case _:
            return value


def substitute(
    value: Any, environment: Mapping[str, str], missing: list[UnsetVariable], keys: Keys = ()
) -> Any:
    """Substitute variables in `value`; append variables that are not set to `missing`."""

    def replacement(match: re.Match[str]) -> str:
        mark, name = match.groups()
        if mark:
            return match[0].removeprefix(mark)
        if name not in environment:
            missing.append(UnsetVariable(name, keys))
        return environment.get(name, "")

    match value:
        case dict():
            return {
                key: substitute(inner, environment, missing, (*keys, str(key)))
                for key, inner in value.items()
            }
        case list():
            return [
                substitute(inner, environment, missing, (*keys, str(n)))
                for n, inner in enumerate(value)
            ]
        case str():
            return _VARIABLE.sub(replacement, value)
        case _:
            return value


def _line_too_deep(text: str) -> int | None:
    """Return the line that exceeds the limit of nesting, or None."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                return event.start_mark.line + 1 if event.start_mark is not None else 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _place_too_large(document: yaml.Node) -> tuple[int, Keys] | None:
    """Return line and keys of the value that exceeds the limit of values, or None."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES + 1  # Recursive anchors.
            sizes[id(node)] = 1 + sum(size(entry) for _, _, entry in _children(node))
        return sizes[id(node)]

    if size(document) <= MAX_VALUES:
        return None
    node, line, keys = document, document.start_mark.line + 1, Keys()
    for _ in range(MAX_DEPTH):
        child = next((entry for entry in _children(node) if size(entry[2]) > MAX_VALUES), None)
        if child is None:
            break
        line, keys, node = child[0], (*keys, child[1]), child[2]
    return line, keys


def _children(node: yaml.Node) -> list[tuple[int, str, yaml.Node]]:
    """Return line, key and node of each child."""
    if isinstance(node, yaml.SequenceNode):
        return [(child.start_mark.line + 1, str(n), child) for n, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return [(name.start_mark.line + 1, str(name.value), child) for name, child in node.value]
    return []


def _child(node: yaml.Node, key: str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        # Merged keys are before the own keys of a mapping, which have priority.
        for name, value in reversed(node.value):
            if name.value == key:
                return name.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        item = node.value[int(key)]
        return item.start_mark.line + 1, item
    return None


def _ambiguities(
    node: yaml.Node | None, keys: Keys, above: tuple[yaml.Node, ...], seen: set[int]
) -> Iterator[tuple[int, Keys, str]]:
    """Yield duplicate keys, and anchors that contain themselves."""
    if any(node is child for child in above):
        yield (
            above[-1].start_mark.line + 1,
            keys,
            "an anchor contains itself; write its value without the anchor",
        )
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    inner: list[tuple[str, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        inner = [(str(n), child) for n, child in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for name, child in node.value:
            line, key = name.start_mark.line + 1, str(name.value)
            if (name.tag, key) in lines:
                first = lines[name.tag, key]
                yield line, (*keys, key), f"this key exists already at line {first}"
            lines.setdefault((name.tag, key), line)
            inner.append((key, child))
    for key, child in inner:
        yield from _ambiguities(child, (*keys, key), (*above, node), seen)
