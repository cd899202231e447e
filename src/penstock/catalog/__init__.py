"""The catalog of a lake: its objects, their changes, their status, and rows as JSON."""
