"""Prerequisites of a Postgres source, each with the statement that establishes it."""

from penstock.sources.postgres.preflight.prerequisites import (
    OLDEST_VERSION,
    check,
    require,
    selected_tables,
)
from penstock.sources.postgres.preflight.publication_setup import (
    create_publication,
    may_create_publication,
    publication_statement,
)
from penstock.sources.postgres.preflight.tables import (
    VIA_ROOT_SINCE,
    privilege_problems,
    stream_problems,
    unpublished_problems,
)

__all__ = [
    "OLDEST_VERSION",
    "VIA_ROOT_SINCE",
    "check",
    "create_publication",
    "may_create_publication",
    "privilege_problems",
    "publication_statement",
    "require",
    "selected_tables",
    "stream_problems",
    "unpublished_problems",
]
