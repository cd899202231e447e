r"""Names of the collections that sources create, composed and parsed.

    shop.public.orders              source, schema, table
    shop."odd.schema"."a/b"         a part with a dot, a slash or a double quote is quoted
    shop.public.U&"two\000Alines"   a part with control characters has SQL's Unicode escapes
    clicks.eu.orders                source and topic; a topic is never quoted

Guarantee: `parse_name(compose_name(*parts)) == parts` for all parts, so two tables never
share a collection. A source name has no dot, and a topic has no quote; so `source_of` is
exact for both, and the topic is everything after the first dot.
"""

import re
from collections.abc import Container
from typing import Final

__all__ = ["compose_name", "has_controls", "parse_name", "source_of", "without_quoted"]

DERIVED: Final = ("_remap", "_errors")
"""Suffixes of the other collections that a source creates."""

# SUBTLE: stored names depend on this set. A set taken from the Unicode database, such as
# that of str.isprintable, would change with the version of Python.
_CONTROLS: Final = "\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
_CONTROL: Final = re.compile(f"[{_CONTROLS}]")
_ESCAPED: Final = re.compile(rf"[\\{_CONTROLS}]")
_QUOTED_ONLY: Final = re.compile(r'[./"]|\A | \Z|\A\Z')
_PART: Final = re.compile(r'([Uu]&)?"((?:[^"]|"")*)"|([^".]+)')
_SPACED_PART: Final = re.compile(r'\s*([Uu]&)?"((?:[^"]|"")*)"\s*|([^".]+)')
_ESCAPE: Final = re.compile(r"\\(?:\\|([0-9A-Fa-f]{4})|\+(0[0-9A-Fa-f]{5}|10[0-9A-Fa-f]{4}))|(\\)")


def compose_name(*parts: str) -> str:
    """Return the name made of these parts, each quoted if it must be.

    >>> compose_name("shop", "weird", "dot.t"), compose_name("shop", "weird.dot", "t")
    ('shop.weird."dot.t"', 'shop."weird.dot".t')
    """
    return ".".join(map(_quote, parts))


def parse_name(name: str, *, strip: bool = False) -> tuple[str, ...] | None:
    """Return the parts of a name; None if a quote is not closed or a part is empty.

    With `strip`, white space around a part is ignored, as people may type it.

    >>> parse_name('shop."weird.dot".t')
    ('shop', 'weird.dot', 't')
    """
    parts: list[str] = []
    position = 0
    pattern = _SPACED_PART if strip else _PART
    while match := pattern.match(name, position):
        part = _unquote(match)
        if strip and part is not None and match[3]:
            part = part.strip()
        if not part:
            return None
        parts.append(part)
        position = match.end()
        if position == len(name):
            return tuple(parts)
        if name[position] != ".":
            return None
        position += 1
    return None


def source_of(collection: str, sources: Container[str]) -> str | None:
    """Return which of these sources creates a collection of this name, if one does.

    >>> source_of("shop.public.orders", {"shop"}), source_of("shop_errors", {"shop"})
    ('shop', 'shop')
    """
    first, dot, _ = collection.partition(".")
    if first in sources:
        return first
    owners = (first.removesuffix(suffix) for suffix in DERIVED if first.endswith(suffix))
    return None if dot else next((owner for owner in owners if owner in sources), None)


def without_quoted(name: str) -> str:
    """Return the name without its quoted parts, whose characters mean nothing but themselves."""
    return _PART.sub(lambda match: match[3] or "", name)


def has_controls(name: str) -> bool:
    """Return whether a name has characters that would change how a terminal shows it."""
    return _CONTROL.search(name) is not None


def _quote(part: str) -> str:
    quoted = '"' + part.replace('"', '""') + '"'
    if has_controls(part):
        return f"U&{_ESCAPED.sub(_escape, quoted)}"
    return quoted if _QUOTED_ONLY.search(part) else part


def _escape(match: re.Match[str]) -> str:
    return "\\\\" if match[0] == "\\" else f"\\{ord(match[0]):04X}"


def _unquote(match: re.Match[str]) -> str | None:
    unicode_escapes, quoted, plain = match.groups()
    if quoted is None:
        return plain
    text = quoted.replace('""', '"')
    if unicode_escapes:
        if any(found[3] for found in _ESCAPE.finditer(text)):
            return None
        text = _ESCAPE.sub(_unescape, text)
    return text


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    return chr(int(digits, 16)) if digits else "\\"
