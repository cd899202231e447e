"""Postgres: a complete first copy of its tables, then every transaction."""
