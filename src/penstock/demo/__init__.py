"""What `penstock demo` is made of: a Postgres, a shop on it, and a comparison at the end.

The server is real and bundled, the shop has traffic with books that must add up, and the
pipeline is a file like anybody's. Only how it ends is the demo's own: with source,
collection and target compared as of one time.
"""
