"""Postgres source: an initial snapshot of its tables, then every transaction."""
