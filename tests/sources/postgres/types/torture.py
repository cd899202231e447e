"""Every type, with values that are hard to represent exactly.

`SETUP` creates missing types; each `Case` is a column: a name,
its SQL type, and literals of SQL that make its values. `create_table` and
`insert_rows` put them all into one table, one row for each value. `known_to` selects the
cases that an older server supports.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

__all__ = [
    "CASES",
    "EACH",
    "SETUP",
    "Case",
    "create_table",
    "insert_rows",
    "known_to",
]

SETUP = r"""
CREATE EXTENSION IF NOT EXISTS hstore SCHEMA public;
CREATE EXTENSION IF NOT EXISTS citext SCHEMA public;
CREATE SCHEMA IF NOT EXISTS "odd schema";
CREATE TYPE public.mood AS ENUM
    ('sad', 'ok', 'very happy', 'NULL', 'null', 'a,b', 'it''s "so"', 'ä{}\');
CREATE TYPE "odd schema"."Odd {Type}" AS ENUM ('x', 'y');
CREATE TYPE public.pair AS (x integer, y text, at timestamptz);
CREATE TYPE public.textrange AS RANGE (subtype = text, collation = "C");
CREATE DOMAIN public.positive AS integer CHECK (VALUE > 0);
CREATE DOMAIN public.very_positive AS public.positive CHECK (VALUE > 10);
CREATE DOMAIN public.price AS numeric(10, 2);
CREATE DOMAIN public.low_price AS public.price CHECK (VALUE < 100);
CREATE DOMAIN public.code AS character(4);
CREATE DOMAIN public.some_numbers AS integer[];
CREATE DOMAIN public.prices AS numeric(6, 1)[];
CREATE DOMAIN public.feeling AS public.mood;
CREATE DOMAIN public.couple AS public.pair;
CREATE DOMAIN public.span AS int4range;
CREATE DOMAIN public.moment AS timestamptz;
CREATE TYPE public.shouted AS ENUM ('a', 'b');
CREATE FUNCTION public.shout(public.shouted) RETURNS text LANGUAGE sql IMMUTABLE
    AS $$ SELECT 'A CAST IS NOT WHAT IS PRINTED'::text $$;
CREATE CAST (public.shouted AS text) WITH FUNCTION public.shout(public.shouted) AS ASSIGNMENT;
CREATE FUNCTION public.shout(public.pair) RETURNS text LANGUAGE sql IMMUTABLE
    AS $$ SELECT 'A CAST IS NOT WHAT IS PRINTED'::text $$;
CREATE CAST (public.pair AS text) WITH FUNCTION public.shout(public.pair) AS ASSIGNMENT;
CREATE FUNCTION public.shout(public.hstore) RETURNS text LANGUAGE sql IMMUTABLE
    AS $$ SELECT 'A CAST IS NOT WHAT IS PRINTED'::text $$;
CREATE CAST (public.hstore AS text) WITH FUNCTION public.shout(public.hstore) AS ASSIGNMENT;
"""


@dataclass(frozen=True)
class Case:
    name: str
    type: str
    literals: tuple[str, ...]
    since: int = 12
    """The first version of the server that takes them."""


def known_to(version: int) -> list[Case]:
    """The cases that a server of this version has."""
    return [case for case in CASES if case.since <= version]


def create_table(table: str, cases: Sequence[Case]) -> str:
    columns = ", ".join(f'"{case.name}" {case.type}' for case in cases)
    return f"CREATE TABLE {table} (id integer PRIMARY KEY, {columns})"


def insert_rows(table: str, cases: Sequence[Case]) -> str:
    """One row for each value; columns that have no more values are null."""
    rows = [
        ", ".join([str(at), *(c.literals[at] if at < len(c.literals) else "NULL" for c in cases)])
        for at in range(max(len(case.literals) for case in cases))
    ]
    return f"INSERT INTO {table} VALUES " + ",\n".join(f"({row})" for row in rows)


def _quoted(*texts: str) -> tuple[str, ...]:
    return ("NULL", *("'" + text.replace("'", "''") + "'" for text in texts))


_TEXTS = (
    "", " ", "plain", "NULL", "null", "with 'quotes' and \"double\"", "back\\slash", "\\N", "\\.",
    "tab\there", "line\nbreak", "return\r", "{}", "{a,b}", "[1:2]={3}", "comma,comma", "100%", "%s",
    "ä é ß 汉字 🦀", "a\u0301", "\ufeffmark", "\u200b", "  both  ", "\x01\x1f\x7f", "x" * 5000,
)  # fmt: skip

_DATES = (
    "2011-11-11", "1970-01-01", "1969-12-31", "2000-01-01", "2000-02-29", "1900-02-28",
    "0001-01-01",
    "0001-12-31 BC", "0001-02-29 BC", "0044-03-15 BC", "0004-02-29", "0005-02-28 BC",
    "0005-02-29 BC", "4714-11-24 BC", "4713-01-01 BC", "9999-12-31", "10000-01-01", "99999-06-15",
    "infinity", "-infinity", "1582-10-04", "1582-10-15", "0100-02-28", "0400-02-29", "2400-02-29",
)  # fmt: skip

_TIMES = (
    "00:00:00", "12:34:56.789", "23:59:59.999999", "00:00:00.000001", "11:11:11.1", "11:11:11.10",
    "01:02:03.00001", "20:00:00.5",
)  # fmt: skip

_MOMENTS = (
    *(f"{day.removesuffix(' BC')} {_TIMES[at % len(_TIMES)]}{' BC' if 'BC' in day else ''}"
      for at, day in enumerate(day for day in _DATES if "infinity" not in day)),
    "infinity", "-infinity", "epoch", "1999-12-31 23:59:59.999999", "1969-12-31 23:59:59.999999",
    "294247-01-10 04:00:54.775806", "294246-12-31 23:59:59.999999", "100000-01-01 00:00:00",
)  # fmt: skip

_FLOATS = (
    "0", "-0", "1", "-1", "NaN", "Infinity", "-Infinity", "0.1", "0.3", "1e-4", "1e-5", "9.999e-5",
    "123456", "1234567", "999999", "1e6", "100000", "1e15", "1e14", "999999999999999",
    "123456789012345", "3.14159265358979", "16777216", "16777217", "33554432", "1e10", "8.5e15",
    "1e20", "1e21", "1e22", "1e23", "9.5367431640625e-07", "1.17549435e-38", "1e-45",
    "3.4028235e38",
    "1e-30", "67108864", "2.5e-7", "0.00012345678", "12345.678",
)  # fmt: skip

CASES = (
    Case("bool", "boolean", ("NULL", "true", "false")),
    Case("int2", "smallint", _quoted("0", "1", "-1", "-32768", "32767", "10", "-10")),
    Case("int4", "integer", _quoted("0", "-2147483648", "2147483647", "100", "-7")),
    Case(
        "int8",
        "bigint",
        _quoted("0", "-9223372036854775808", "9223372036854775807", "1000000000000000000", "-1"),
    ),
    Case("float4", "real", _quoted(*_FLOATS)),
    Case(
        "float8",
        "double precision",
        _quoted(
            *_FLOATS,
            "5e-324",
            "-5e-324",
            "2.2250738585072014e-308",
            "2.225073858507201e-308",
            "1.7976931348623157e308",
            "9007199254740993",
            "9007199254740992",
            "1e100",
            "1e-100",
            "5.684341886080802e-14",
            "1e43",
            "2e23",
            "9e22",
            "4.35",
            "1.1e-320",
        ),
    ),
    Case("negative_nan", "double precision", ("'Infinity'::float8 - 'Infinity'::float8",)),
    Case(
        "numeric",
        "numeric",
        _quoted(
            "0",
            "0.0",
            "0.00",
            "1",
            "1.0",
            "1.10",
            "-1.5000",
            "NaN",
            "0.000000000000000000000000000001",
            "-1111111111111111111111111111111",
            "1e400",
            "1e-400",
            "123456789012345678901234567890123456789012345678901234567890.12345678901234567890",
        ),
    ),
    Case("numeric_infinity", "numeric", _quoted("Infinity", "-Infinity"), since=14),
    Case(
        "numeric_10_2",
        "numeric(10,2)",
        _quoted(
            "0",
            "0.01",
            "-0.01",
            "1",
            "99999999.99",
            "-99999999.99",
            "10",
            "1234.5",
            "100.10",
            "0.50",
            "10000",
            "99990000",
            "0.99",
            "-12345678.90",
            "5000.00",
        ),
    ),
    Case(
        "numeric_38_0",
        "numeric(38,0)",
        _quoted(
            "0",
            "9" * 38,
            "-" + "9" * 38,
            "1",
            "-1",
            "1" + "0" * 37,
            "18446744073709551615",
            "18446744073709551616",
            "-18446744073709551616",
            "9223372036854775808",
            "10000",
            "99999999999999999999",
            "340282366920938463463374607431768211",
        ),
    ),
    Case(
        "numeric_38_38",
        "numeric(38,38)",
        _quoted("0", "0." + "9" * 38, "-0." + "9" * 38, "0." + "0" * 37 + "1", "0.1", "0.0001"),
    ),
    Case(
        "numeric_38_10",
        "numeric(38,10)",
        _quoted(
            "0",
            "9" * 28 + "." + "9" * 10,
            "-1.0000000001",
            "12345678901234567890.5",
            "0.00001",
            "10000.0001",
            "99999999.99999999",
        ),
    ),
    Case("numeric_19_1", "numeric(19,1)", _quoted("0", "9" * 18 + ".9", "-" + "9" * 18 + ".9")),
    Case("numeric_18_18", "numeric(18,18)", _quoted("0", "0." + "9" * 18, "-0." + "0" * 17 + "1")),
    Case("numeric_1_0", "numeric(1,0)", _quoted("0", "9", "-9")),
    Case("numeric_1_1", "numeric(1,1)", _quoted("0", "0.9", "-0.9")),
    Case("numeric_5", "numeric(5)", _quoted("0", "99999", "-1.4")),
    Case("numeric_39_0", "numeric(39,0)", _quoted("9" * 39, "NaN", "-1")),
    Case(
        "numeric_3_minus_2",
        "numeric(3,-2)",
        _quoted("12345", "99900", "0", "-100", "NaN"),
        since=15,
    ),
    Case("numeric_2_5", "numeric(2,5)", _quoted("0.00099", "-0.00001", "0"), since=15),
    Case("numeric_1000_500", "numeric(1000,500)", _quoted("1", "1e-500", "1e499")),
    Case("text", "text", _quoted(*_TEXTS)),
    Case("varchar", "character varying(5000)", _quoted(*_TEXTS)),
    Case("varchar_any", "varchar", _quoted("", "a ", "NULL")),
    Case("char_10", "character(10)", _quoted("", "a", "a  ", "  a", "exactly10c", "ääää", "NULL")),
    Case("char_1", "char", _quoted("", "x", " ")),
    Case("bpchar", "bpchar", _quoted("", "x", "x   ", "   ")),
    Case(
        "one_char",
        '"char"',
        (
            "NULL",
            "'x'",
            "''",
            "' '",
            "'\\'",
            '0::"char"',
            '10::"char"',
            "'\"'",
            "','",
        ),
    ),
    # Older servers print a byte that is not UTF-8, which is refused.
    Case("high_char", '"char"', ('(-1)::"char"', '(-128)::"char"'), since=15),
    Case("name", "name", _quoted("", "abc", "a b", "x" * 63, "ä")),
    Case("citext", "public.citext", _quoted("", "MiXeD", "NULL")),
    Case(
        "bytea",
        "bytea",
        (
            "NULL",
            r"'\x'",
            r"'\x00'",
            r"'\xABCDEF1234'",
            r"'\x5c78'",
            "decode(repeat('ff', 3000), 'hex')",
            "'text'::bytea",
        ),
    ),
    Case("date", "date", (*_quoted(*_DATES), "'5874897-12-31'", "'1000000-01-01'")),
    Case("time", "time", _quoted(*_TIMES, "24:00:00", "23:59:60")),
    Case("time_3", "time(3)", _quoted(*_TIMES)),
    Case(
        "timetz",
        "time with time zone",
        _quoted(
            "00:00:00+00",
            "24:00:00-15:59",
            "12:34:56.789+05:30",
            "12:00:00-09",
            "01:00:00+15:59:59",
        ),
    ),
    Case("timestamp", "timestamp", _quoted(*_MOMENTS)),
    Case("timestamp_3", "timestamp(3)", _quoted(*_MOMENTS[:20])),
    Case("timestamp_0", "timestamp(0)", _quoted("2011-11-11 11:11:11.5", "infinity")),
    Case(
        "timestamptz",
        "timestamp with time zone",
        _quoted(
            *(
                f"{each} UTC" if "infinity" not in each and each != "epoch" else each
                for each in _MOMENTS
            ),
            "2011-11-11 11:11:11.123456-09",
            "2011-11-11 11:11:11.123456+09",
            "1901-01-01 00:00:00+00",
            "1847-12-01 00:00:00 Europe/London",
        ),
    ),
    Case(
        "interval",
        "interval",
        _quoted(
            "0",
            "1 year 2 month 3 day 4 hour 5 minute 6.789123 second",
            "-1 day",
            "1 mon -1 day",
            "-00:00:00.000001",
            "178000000 years",
            "-178000000 years",
            "1 day -01:00:00",
            "-1 year -2 mons +3 days -04:05:06",
            "100000:00:00",
            "24 hours",
            "0.000001 s",
        ),
    ),
    Case("interval_ym", "interval year to month", _quoted("1-2", "-1-2")),
    Case(
        "uuid",
        "uuid",
        _quoted(
            "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "00000000-0000-0000-0000-000000000000", "f" * 32
        ),
    ),
    Case(
        "json",
        "json",
        _quoted(
            '{"bar": "baz", "balance": 7.77, "active": false}',
            "null",
            '""',
            '{"a":1,"a":2}',
            " [1 , 2]\n",
            "1e1000",
            '"\\u0000"',
            '"\\ud83e"',
        ),
    ),
    Case(
        "jsonb",
        "jsonb",
        _quoted(
            '{"bar": "baz", "balance": 7.770, "active": false}',
            "null",
            '{"a":1,"a":2}',
            "[]",
            '"ä\\n"',
            "1e100",
            "1.10",
            "-0",
        ),
    ),
    Case("jsonpath", "jsonpath", _quoted("$.a[*] ? (@ > 1)")),
    Case(
        "xml",
        "xml",
        (
            "NULL",
            "xml '<a/>'",
            "xml '<a>ä &amp; b</a>'",
            "xml 'text'",
            'xmlparse(document \'<?xml version="1.0" encoding="latin1"?><a/>\')',
            "xmlparse(document '<?xml version=\"1.1\"?><a/>')",
            "xml ' <a/> '",
        ),
    ),
    Case(
        "inet",
        "inet",
        _quoted(
            "1.2.3.4", "1.2.3.4/24", "::1", "::1/64", "0.0.0.0/0", "::ffff:1.2.3.4", "2001:db8::/32"
        ),
    ),
    Case("cidr", "cidr", _quoted("10.0.0.0/8", "1.2.3.4/32", "::/0", "10")),
    Case("macaddr", "macaddr", _quoted("08:00:2b:01:02:03", "ffffffffffff")),
    Case("macaddr8", "macaddr8", _quoted("08:00:2b:01:02:03:04:05", "08002b:010203")),
    Case("bit_3", "bit(3)", _quoted("101", "000")),
    Case("bit_1", "bit", _quoted("1")),
    Case("varbit", "bit varying", _quoted("", "1", "0" * 100)),
    Case(
        "money",
        "money",
        _quoted("0", "-1234567.89", "92233720368547758.07", "-92233720368547758.08", "0.01"),
    ),
    Case("oid", "oid", _quoted("42", "2147483648", "4294967295", "0")),
    Case("xid", "xid", _quoted("0", "3", "4294967295")),
    Case("cid", "cid", _quoted("0", "4294967295")),
    Case("xid8", "xid8", _quoted("0", "18446744073709551615"), since=13),
    Case("tid", "tid", _quoted("(0,1)", "(4294967295,65535)")),
    Case("regclass", "regclass", _quoted("pg_class", "pg_catalog.pg_type", "4000000000", "-")),
    Case("regtype", "regtype", _quoted("int4", "public.mood", "text[]")),
    Case("regproc", "regproc", _quoted("now", "0")),
    Case("regprocedure", "regprocedure", _quoted("abs(integer)")),
    Case("regnamespace", "regnamespace", _quoted("public", '"odd schema"')),
    Case("regrole", "regrole", _quoted("postgres")),
    Case("int2vector", "int2vector", _quoted("1 2 3", "")),
    Case("oidvector", "oidvector", _quoted("1 2 3", "")),
    Case("pg_lsn", "pg_lsn", _quoted("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF")),
    Case("pg_snapshot", "pg_snapshot", _quoted("10:20:10,14,15"), since=13),
    Case("tsvector", "tsvector", _quoted("a fat cat", "'it''s':1A,2 b:3", "")),
    Case("tsquery", "tsquery", _quoted("fat & (rat | !cat)", "")),
    Case("point", "point", _quoted("(0.1,-0)", "(NaN,Infinity)", "(1e300,1e-300)")),
    Case("line", "line", _quoted("{1,2,3}")),
    Case("lseg", "lseg", _quoted("[(0,0),(1,1)]")),
    Case("box", "box", _quoted("(1,1),(0,0)")),
    Case("path", "path", _quoted("((0,0),(1,1))", "[(0,0),(1,1)]")),
    Case("polygon", "polygon", _quoted("((0,0),(1,1),(1,0))")),
    Case("circle", "circle", _quoted("<(0,0),1.5>")),
    Case("hstore", "public.hstore", _quoted("a=>1", "a=>NULL", "", '"a b"=>"c,d"')),
    Case(
        "enum",
        "public.mood",
        _quoted("sad", "very happy", "NULL", "null", "a,b", 'it\'s "so"', "ä{}\\"),
    ),
    Case("odd_enum", '"odd schema"."Odd {Type}"', _quoted("x", "y")),
    Case("cast_enum", "public.shouted", _quoted("a", "b")),
    Case(
        "composite",
        "public.pair",
        (
            "NULL",
            "ROW(1, 'a', '2011-11-11 11:11:11+09')",
            "ROW(NULL, NULL, NULL)",
            "ROW(1, '', 'infinity')",
            "ROW(-1, 'a\"b\\c,d(e) ', '0044-03-15 BC')",
        ),
    ),
    Case("domain", "public.positive", _quoted("1", "2147483647")),
    Case("domain_domain", "public.very_positive", _quoted("11")),
    Case("domain_numeric", "public.price", _quoted("0", "99999999.99", "1.5")),
    Case("domain_domain_numeric", "public.low_price", _quoted("99.99", "-5")),
    Case("domain_char", "public.code", _quoted("", "a", "abcd")),
    Case("domain_array", "public.some_numbers", _quoted("{}", "{1,2}", "{{1},{2}}", "[0:0]={7}")),
    Case("domain_numeric_array", "public.prices", _quoted("{}", "{1,2.5,NULL}")),
    Case("domain_enum", "public.feeling", _quoted("sad", "NULL")),
    Case(
        "domain_composite", "public.couple", ("NULL", "ROW(1, 'a', NULL)", "ROW(NULL, NULL, NULL)")
    ),
    Case("domain_range", "public.span", _quoted("[1,5)", "empty")),
    Case("domain_timestamptz", "public.moment", _quoted("2011-11-11 11:11:11.5+09", "infinity")),
    Case("int4range", "int4range", _quoted("[1,5]", "empty", "(,)", "[1,)", "(,1)")),
    Case("int8range", "int8range", _quoted("[1,5]", "empty")),
    Case("numrange", "numrange", _quoted("[1.10,5.0)", "(0,NaN]", "[,]")),
    Case("daterange", "daterange", _quoted("[2011-11-11,infinity)", "[0044-03-15 BC,)")),
    Case("tsrange", "tsrange", _quoted("[2011-11-11 11:11:11,infinity]", "(,)")),
    Case("tstzrange", "tstzrange", _quoted("[2011-11-11 11:11:11+09,2012-01-01)", "empty")),
    Case("textrange", "public.textrange", _quoted("[a,b)", '["a,b","c""d"]', "empty")),
    Case("int4multirange", "int4multirange", _quoted("{}", "{[1,2),[5,9)}"), since=14),
    Case(
        "tstzmultirange",
        "tstzmultirange",
        _quoted("{[2011-11-11 11:11:11+09,2012-01-01)}"),
        since=14,
    ),
    Case(
        "int4_array",
        "integer[]",
        _quoted(
            "{}",
            "{1,2}",
            "{NULL}",
            "{1,NULL,3}",
            "{{1},{2}}",
            "{{1,2,3},{4,5,6}}",
            "[0:1]={1,2}",
            "[-2:-1]={1,2}",
            "[1:1][-2:-1][3:5]={{{1,2,3},{4,5,6}}}",
            "{{{{{{1}}}}}}",
            "[2:2]={NULL}",
            "{{NULL,1},{2,NULL}}",
            "[2147483646:2147483646]={1}",
            "[-2147483648:-2147483648]={1}",
        ),
    ),
    Case("int4_array_2", "integer[][]", _quoted("{1}", "{{1,2}}")),
    Case("int4_array_3", "integer[3]", _quoted("{1}", "{1,2,3,4}")),
    Case("int2_array", "smallint[]", _quoted("{-32768,32767}", "{}")),
    Case("int8_array", "bigint[]", _quoted("{-9223372036854775808,9223372036854775807,NULL}")),
    Case("bool_array", "boolean[]", _quoted("{t,f,NULL}", "{{t},{f}}")),
    Case(
        "float8_array", "double precision[]", _quoted("{0.1,NaN,Infinity,-Infinity,-0,1e300,NULL}")
    ),
    Case("float4_array", "real[]", _quoted("{0.1,1e-45,1e6}")),
    Case("numeric_array", "numeric[]", _quoted("{1.10,NaN,1e50,NULL}", "{}")),
    Case("numeric_10_2_array", "numeric(10,2)[]", _quoted("{1.1,-0.01,NULL}", "{{1},{2}}")),
    Case(
        "text_array",
        "text[]",
        (
            "NULL",
            "'{}'",
            "array['']",
            "array['NULL', NULL, 'null', 'nUlL', 'NULLS']",
            "array['a,b', 'c\"d', 'e\\f', '{g}', ' h', 'i ', E'j\\nk', 'l''m', ';']",
            "array[E'\\t', E'\\v', E'\\f', E'\\r', E'\\n']",
            "array[array['a','b'], array['c', NULL]]",
            "'[5:6]={x,\"y z\"}'",
            "array['ä','🦀',E'\\u00a0']",
            "array[E'\\x01']",
            "array[repeat('\"', 2000)]",
            "array['[1:2]={3}', '=', ':']",
            "array[NULL, NULL]::text[]",
            "array['{}']",
            "array['\\', '\"', '\\\"']",
        ),
    ),
    Case("varchar_array", "varchar(5)[]", _quoted('{a,"b c"}')),
    Case("char_array", "character(5)[]", _quoted('{a,"b c","",NULL}')),
    Case("one_char_array", '"char"[]', _quoted('{a," ",""}')),
    Case("name_array", "name[]", _quoted('{a,"b c"}')),
    Case("bytea_array", "bytea[]", ("NULL", r"array['\x'::bytea, '\x00', '\xABCD', NULL]", "'{}'")),
    Case("date_array", "date[]", _quoted('{2011-11-11,infinity,-infinity,"0044-03-15 BC",NULL}')),
    Case("time_array", "time[]", _quoted("{24:00:00,11:11:11.1}")),
    Case("timestamp_array", "timestamp[]", _quoted("{2011-11-11 11:11:11.5,infinity,NULL}")),
    Case(
        "timestamptz_array",
        "timestamptz[]",
        _quoted(
            '{2011-11-11 11:11:11+09,"0044-03-15 00:00:00 BC",-infinity}',
            "{{2011-11-11 11:11:11+09},{2011-11-11 11:11:11.1+09}}",
        ),
    ),
    Case("interval_array", "interval[]", _quoted("{1y,2d}", "{-1d}")),
    Case("uuid_array", "uuid[]", _quoted("{A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11,NULL}")),
    Case("json_array", "json[]", ("NULL", "array['{\"a\": [1, \"b\"]}', 'null', NULL]::json[]")),
    Case("jsonb_array", "jsonb[]", ("NULL", "array['{\"a\": [1, \"b\"]}', 'null', NULL]::jsonb[]")),
    Case("inet_array", "inet[]", _quoted("{1.2.3.4,1.2.3.4/24}")),
    Case("bit_array", "bit(3)[]", _quoted("{101,NULL}")),
    Case("money_array", "money[]", _quoted('{"$1,234.50",-2}')),
    Case("xml_array", "xml[]", ("NULL", "array[xml '<a b=\"c\"/>']")),
    Case("oid_array", "oid[]", _quoted("{4294967295,0}")),
    Case("regclass_array", "regclass[]", _quoted("{pg_class}")),
    Case("point_array", "point[]", _quoted('{"(0.1,2)",NULL}')),
    Case("box_array", "box[]", _quoted("{(1,1),(0,0);(2,2),(1,1)}")),
    Case("tsvector_array", "tsvector[]", _quoted("{\"'a' 'b'\"}")),
    Case("hstore_array", "public.hstore[]", ("NULL", "array['a=>1', 'b=>NULL']::public.hstore[]")),
    Case("citext_array", "public.citext[]", _quoted("{A,b}")),
    Case(
        "enum_array",
        "public.mood[]",
        ("NULL", "array['sad', 'very happy', 'NULL', 'a,b', 'ä{}\\', NULL]::public.mood[]"),
    ),
    Case("domain_element_array", "public.price[]", _quoted("{1,2.50,NULL}")),
    Case(
        "array_domain_array",
        "public.some_numbers[]",
        ("NULL", "array['{1,2}', '{}', NULL, '{{1},{2}}']::public.some_numbers[]"),
    ),
    Case(
        "composite_array",
        "public.pair[]",
        ("NULL", "array[ROW(1, 'a b', NULL), ROW(NULL, NULL, NULL), NULL]::public.pair[]"),
    ),
    Case("range_array", "int4range[]", _quoted('{"[1,2)",empty,NULL}')),
    Case("multirange_array", "int4multirange[]", _quoted('{"{[1,2)}","{}"}'), since=14),
)

EACH = [pytest.param(case, id=case.name, marks=pytest.mark.postgres(case.since)) for case in CASES]
"""One parameter of a test for each case, which older servers skip."""
