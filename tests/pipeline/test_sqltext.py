"""SQL without Spark: which views a step reads, and what is not closed."""

import pytest

from headrace.pipeline.ddl import SchemaError, columns
from headrace.pipeline.sqltext import mistake_in, views_read


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("SELECT * FROM orders", [("orders", 0)]),
        ("select a.x\nfrom A a\njoin `b c` on a.x = b.x", [("A", 1), ("b c", 2)]),
        ("SELECT * FROM (SELECT * FROM inner_one) x", [("inner_one", 0)]),
        ("WITH recent AS (SELECT * FROM orders) SELECT * FROM recent", [("orders", 0)]),
        ("SELECT extract(year FROM at), trim(BOTH 'x' FROM y) FROM t", [("t", 0)]),
        ("SELECT 1 FROM t WHERE a IS DISTINCT FROM b AND c IS NOT DISTINCT FROM d", [("t", 0)]),
        ("SELECT 'from nowhere' FROM t -- from there\n/* from here */", [("t", 0)]),
        ("SELECT * FROM range(5)", []),
        ("SELECT * FROM parquet.`/a/b`", []),
        ("SELECT DISTINCT id FROM t", [("t", 0)]),
        ("SELECT * FROM t LEFT OUTER JOIN LATERAL explode(x) y", [("t", 0)]),
    ],
)
def test_the_views_that_sql_reads_are_found(sql: str, read: list[tuple[str, int]]) -> None:
    assert views_read(sql) == read


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SELECT (1", "a ( that is not closed"),
        ("SELECT 1)", "a ) without its ("),
        ("SELECT 'x", "the quote ' is not closed"),
        ("SELECT ')', \"(\", `(` FROM t -- (", None),
    ],
)
def test_what_is_not_closed_is_named(sql: str, what: str | None) -> None:
    found = mistake_in(sql)
    assert (found.what if found is not None else None) == what


def test_a_schema_gives_columns_and_types() -> None:
    text = "id BIGINT NOT NULL, tags array<string>, `at it` timestamp, m map<string, struct<a: int, b:dec(5,2)>>, n:int"
    assert columns(text) == {
        "id": "bigint",
        "tags": "array<string>",
        "at it": "timestamp",
        "m": "map<string, struct<a: int, b:dec(5,2)>>",
        "n": "int",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id", "'id' is no column"),
        ("id bigint, id string", "column 'id' is there twice"),
        ("id strng", "did you mean string?"),
        ("t array<strng>", "did you mean string?"),
        ("t array", "array wants its types in <>"),
        ("m map<string>", "has 1 types"),
        ("t array<string", "not closed"),
        ("", "it has no columns"),
    ],
)
def test_a_schema_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(SchemaError, match=said.replace("(", r"\(").replace("?", r"\?")):
        columns(text)
