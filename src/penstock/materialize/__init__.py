"""The runtime's side of the protocol: speaking to a connector, whoever wrote it."""

import penstock.protocol  # noqa: F401 - before gRPC, of which it says how loud it is
from penstock.materialize.client import Connection, Generation, Stream, connect

__all__ = ["Connection", "Generation", "Stream", "connect"]
