"""Printer for the rows of a table: `python sqlite_rows.py FILE TABLE`."""

import json
import sqlite3
import sys

connection = sqlite3.connect(sys.argv[1], timeout=10)
connection.row_factory = sqlite3.Row
quoted = sys.argv[2].replace('"', '""')
for row in connection.execute(f'SELECT * FROM "{quoted}"'):
    sys.stdout.write(json.dumps(dict(row)) + "\n")
