"""Who holds the lock of a storage location, and whether they live."""

import os
import socket

from penstock.persist.lake import open_store
from penstock.persist.machine import Machine
from penstock.persist.settings import Settings
from penstock.persist.state import Writer

__all__ = ["lives", "owner_of"]


def owner_of(url: str) -> Writer | None:
    """Who holds the lock of a storage location."""
    blob = open_store(url, Settings())
    try:
        return Machine(blob, Settings()).load().writer
    finally:
        blob.close()


def lives(writer: Writer) -> bool:
    """Whether a writer's process may be there: it is, or is on another host."""
    if writer.host != socket.gethostname():
        return True
    try:
        os.kill(writer.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
