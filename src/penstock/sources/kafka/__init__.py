"""Kafka: topics, read in their own time, offset by offset."""
