"""Three example connectors, one for each pattern without a database.

    staged-files   recovery log with idempotent apply: exactly once
    plain-files    recovery log with a store that has no transactions: at least once
    push-files     push-only, delta updates: at least once

Each connector is one module. `folder.py` has the shared Validate and Apply, `atomic_files.py` the
functions that write files durably.

    python -m penstock.connectors.files FOLDER NAME

prints the documents of a resource, one per line.
"""
