"""Sections of the sources in a pipeline file, one module per built-in kind.

A kind of another package brings the pydantic model of its section; the instance is the config.
"""

from importlib import import_module
from typing import Any

from penstock.sources.registry import SourceKind

__all__ = ["section_of"]


def section_of(kind: SourceKind) -> Any:
    """Return the type that validates the section of a kind."""
    if kind.section is not None:
        return kind.section
    return import_module(f"{__name__}.{kind.name}").SECTION
