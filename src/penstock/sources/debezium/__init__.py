"""Debezium change events: envelope, transaction metadata, duplicates."""
