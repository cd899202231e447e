"""Kafka source: topics as collections, each partition read offset by offset."""
