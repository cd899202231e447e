"""Printer for the rows that `plain.py` stores: `python rows.py plain.db NAME`."""

import json
import sqlite3
import sys

for table in ("rows", "pushed"):
    query = f"select doc from {table} where resource = ?"
    for (doc,) in sqlite3.connect(sys.argv[1], timeout=10).execute(query, [sys.argv[2]]):
        sys.stdout.write(json.dumps(json.loads(doc)) + "\n")
