"""Exports of a package that are imported at their first use.

A package exports names of its modules, and a caller often needs only one of them. With this
function the caller loads only the module of that name:

    if not TYPE_CHECKING:
        __getattr__ = lazy_exports(__name__, module=("Name", "other_name"))

For type checkers the package imports the names in the usual way, below `if TYPE_CHECKING:`.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, **exports: Sequence[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, from its modules and the names that each exports."""
    modules = {name: module for module, names in exports.items() for name in names}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
