"""SQL statements of a fingerprint.

Two statements use the same catalog rows, for the publication named $1 and the tables with the oids
$2. `query` reads the rows. `digest` reads only the transaction that wrote each row. It is several
times cheaper, and suffices to detect that nothing was written. Neither locks a user table.
"""

from penstock.sources.postgres.catalog import MISSING
from penstock.sources.postgres.publication import membership, publication_columns

__all__ = ["digest", "query"]


def query(version: int) -> str:
    """Return SQL for rows of a kind and a JSON array: publication, table, partition or type."""
    listed = "to_json(m.prattrs::pg_catalog.int2[])" if version >= 150000 else "NULL::json"
    filtered = "pg_catalog.md5(m.prqual::text)" if version >= 150000 else "NULL::text"
    return f"""
    WITH RECURSIVE {membership(version)},
    {_TOKENS},
    {_MADE_OF}
    SELECT 'publication', json_build_array({publication_columns(version)})
    FROM pub JOIN pg_catalog.pg_publication p ON p.oid = pub.oid
    UNION ALL
    SELECT 'table', json_build_array(
      c.oid::int8, n.nspname, c.relname, c.relkind, c.relfilenode::int8, c.xmin::text,
      c.relreplident, r.published,
      coalesce(k.tokens, '[]'), {_INDEXES}, m.listed, m.filtered,
      (SELECT json_agg(json_build_array(a.attnum, a.attname, a.atttypid::int8, a.atttypmod,
          NOT a.attnotnull, a.attgenerated, a.xmin::text, {MISSING}) ORDER BY a.attnum)
       FROM pg_catalog.pg_attribute a
       WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped))
    FROM relation r
    JOIN pg_catalog.pg_class c ON c.oid = r.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL (
      SELECT {listed} AS listed, {filtered} AS filtered
      FROM pub JOIN pg_catalog.pg_publication_rel m ON m.prpubid = pub.oid AND m.prrelid = c.oid
    ) m ON true
    LEFT JOIN token k ON k.oid = c.oid
    UNION ALL
    SELECT 'partition', json_build_array(
      t.root::int8, c.oid::int8, n.nspname, c.relname, t.parent::int8, c.relkind,
      c.relfilenode::int8, c.xmin::text, c.relreplident, {_NAMED_INDEXES}, t.attached, {_BORN},
      (SELECT coalesce(json_agg(json_build_array(a.attname, {MISSING}) ORDER BY a.attname), '[]')
       FROM pg_catalog.pg_attribute a
       WHERE a.attrelid = c.oid AND a.atthasmissing AND NOT a.attisdropped))
    FROM relation r
    JOIN tree t ON t.root = r.oid AND t.oid <> r.oid AND r.published
    JOIN pg_catalog.pg_class c ON c.oid = t.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    UNION ALL
    SELECT 'type', json_build_array(u.oid::int8, pg_catalog.format_type(u.oid, NULL),
      (SELECT coalesce(json_agg(json_build_array(e.oid::int8, e.enumlabel) ORDER BY e.oid), '[]')
       FROM pg_catalog.pg_enum e WHERE e.enumtypid = u.oid),
      (SELECT coalesce(json_agg(json_build_array(a.attnum, a.attname, a.atttypid::int8,
           a.atttypmod) ORDER BY a.attnum), '[]')
       FROM pg_catalog.pg_type t JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid
       WHERE t.oid = u.oid AND a.attnum > 0 AND NOT a.attisdropped),
      (SELECT coalesce(json_agg(part.oid::int8), '[]') FROM ({_PARTS}) part (oid)
       WHERE part.oid >= 16384))
    FROM made_of u
    """


def digest(version: int) -> str:
    """Return SQL for one text, which differs whenever a row that `query` reads was written."""
    return f"""
    WITH RECURSIVE {membership(version)},
    {_TOKENS},
    {_MADE_OF}
    SELECT count(*) || ':' || coalesce(sum(pg_catalog.hashtextextended(row, 0)), 0)
    FROM (
      SELECT 'p' || p.oid || ':' || p.row_xid FROM pub p
      UNION ALL
      SELECT 't' || k.oid || ':' || k.tokens::text FROM token k
      UNION ALL
      SELECT 'c' || c.oid || ':' || c.xmin || ':' || r.published || ':' || n.oid || ':' || n.xmin
      FROM relation r JOIN pg_catalog.pg_class c ON c.oid = r.oid
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      UNION ALL
      SELECT 'a' || a.attrelid || ':' || a.attnum || ':' || a.xmin
      FROM relation r JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0
      UNION ALL
      SELECT 'i' || i.indexrelid || ':' || i.xmin
      FROM relation r JOIN pg_catalog.pg_index i ON i.indrelid = r.oid
      UNION ALL
      SELECT 'l' || t.root || ':' || t.oid || ':' || t.attached || ':' || c.xmin
      FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.oid WHERE t.oid <> t.root
      UNION ALL
      SELECT 'j' || i.indexrelid || ':' || i.xmin
      FROM tree t JOIN pg_catalog.pg_index i ON i.indrelid = t.oid WHERE t.oid <> t.root
      UNION ALL
      SELECT 'e' || e.oid || ':' || e.xmin
      FROM made_of u JOIN pg_catalog.pg_enum e ON e.enumtypid = u.oid
      UNION ALL
      SELECT 'y' || t.oid || ':' || t.xmin || ':' || coalesce(a.attnum || ':' || a.xmin, '')
      FROM made_of u JOIN pg_catalog.pg_type t ON t.oid = u.oid
      LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0
    ) rows (row)
    """


_PARTS = """
  SELECT part.oid FROM pg_catalog.pg_type t
  CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) part (oid) WHERE t.oid = u.oid
  UNION ALL
  SELECT g.rngsubtype FROM pg_catalog.pg_range g WHERE g.rngtypid = u.oid
  UNION ALL
  SELECT a.atttypid FROM pg_catalog.pg_type t
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid
  WHERE t.oid = u.oid AND t.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped"""

_TOKENS = """
  token (oid, tokens) AS (
    SELECT t.oid, json_agg(DISTINCT m.token)
    FROM tree t JOIN member m ON m.oid = t.root GROUP BY t.oid
  )"""

_MADE_OF = f"""
  made_of (oid) AS (
    SELECT a.atttypid FROM relation r JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid
    WHERE a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
    UNION
    SELECT part.oid FROM made_of u CROSS JOIN LATERAL ({_PARTS}) part (oid)
    WHERE part.oid >= 16384
  )"""

# The subscripts of an int2vector start at 0.
_INDEXES = """
  (SELECT coalesce(json_agg(json_build_array(i.indexrelid::int8, i.indisprimary, i.indisreplident,
       i.indimmediate, i.indkey[0:i.indnkeyatts - 1])), '[]')
   FROM pg_catalog.pg_index i
   WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident))"""

_NAMED_INDEXES = """
  (SELECT coalesce(json_agg(json_build_array(i.indexrelid::int8, i.indisprimary, i.indisreplident,
       i.indimmediate, (
         SELECT json_agg(a.attname ORDER BY u.position)
         FROM unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY u (number, position)
         JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = u.number
         WHERE u.position <= i.indnkeyatts))), '[]')
   FROM pg_catalog.pg_index i
   WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident))"""

# ATTACH and DETACH mark each column of the table as inherited or local, which writes the rows of
# the columns again. The row of a system column is never written again. An inherited column whose
# row is as old as the row of a system column therefore proves that the table was created as a
# partition and has been one since.
_BORN = """
  EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a
     JOIN pg_catalog.pg_attribute s ON s.attrelid = a.attrelid AND s.attname = 'ctid'
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attislocal AND NOT a.attisdropped
       AND a.xmin = s.xmin AND a.cmin = s.cmin)"""
