"""Test kit for Penstock and for connectors: manual clock, failing stores, conformance suite."""
