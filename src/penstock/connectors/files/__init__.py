"""Three connectors to copy, one for each pattern that is not a database's.

    staged-files   recovery log with idempotent apply: exactly once
    plain-files    recovery log with a store that has no transactions: at least once
    push-files     push-only, delta updates: at least once

Each is one module, which reads from top to bottom. What they have in common, a
folder with a folder for each resource in it, is in `folder.py`; how its files are
written so that they survive a crash, in `atomic_files.py`.

    python -m penstock.connectors.files FOLDER NAME

prints the documents of a resource, a line for each.
"""
