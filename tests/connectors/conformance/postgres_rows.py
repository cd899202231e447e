"""Printer for the rows of a table: `python postgres_rows.py URL TABLE`."""

import sys

import psycopg
from psycopg import sql

with psycopg.connect(sys.argv[1]) as connection:
    query = sql.SQL("SELECT row_to_json(t)::text FROM {} t").format(sql.Identifier(sys.argv[2]))
    for (row,) in connection.execute(query):
        sys.stdout.write(row + "\n")
