"""Connection to a newer server that reports an older version."""

from penstock.pgclient import Connection


class Older:
    """Connection that reports an older server version."""

    def __init__(self, connection: Connection, server_version: int) -> None:
        self.query = connection.query
        self.execute = connection.execute
        self.server_version = server_version
