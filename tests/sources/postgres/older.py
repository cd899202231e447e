"""A newer server, asked as an older one is."""

from penstock.sources.postgres.connect import Connection


class Older:
    """A connection that says it leads to an older server."""

    def __init__(self, connection: Connection, server_version: int) -> None:
        self.query = connection.query
        self.execute = connection.execute
        self.server_version = server_version
