"""Bytes that survive: keys to bytes (`Blob`), and numbered entries on top (`Log`)."""

from penstock.durable.blob import Blob, GetBlob, Listed
from penstock.durable.location import children, join, open_blob
from penstock.durable.log import Log, Marks

__all__ = ["Blob", "GetBlob", "Listed", "Log", "Marks", "children", "join", "open_blob"]
