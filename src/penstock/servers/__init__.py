"""Local servers for the demo, the tests, the examples and the benchmarks."""

from typing import TYPE_CHECKING

from penstock.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.servers.kafka import KafkaBroker
    from penstock.servers.postgres import PostgresServer

__all__ = ["KafkaBroker", "PostgresServer"]

if not TYPE_CHECKING:
    # Each server is also a program, which must not be imported before it runs.
    __getattr__ = lazy_exports(
        __name__,
        kafka=("KafkaBroker",),
        postgres=("PostgresServer",),
    )
