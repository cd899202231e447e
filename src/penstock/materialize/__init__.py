"""The runtime's side of the protocol: speaking to a connector, whoever wrote it."""

from penstock.materialize.client import Connection, Generation, Stream, connect

__all__ = ["Connection", "Generation", "Stream", "connect"]
