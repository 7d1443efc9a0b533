"""The account of the demo's pipeline is honest: loss, doubling and damage planted in what was read are counted."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq

from examples.chart import write_chart
from examples.demo_pipeline import Books, balance, balance_windows, read_sales
from examples.shop import Ledger, Order

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def shop(count: int = 40) -> tuple[Ledger, list[dict[str, Any]]]:
    """A shop's ledger, and the rows that a right pipeline makes of it."""
    ledger = Ledger()
    for number in range(1, count + 1):
        order = Order(number, number % 8, 100 + number, NOON + timedelta(seconds=number))
        ledger.orders[number] = order
        if number % 2:
            ledger.paid.add(number)
    rows = [
        {"start": start, "region": region, "orders": orders, "cents": cents, "ids": ids}
        for (start, region), (orders, cents, ids) in ledger.cells.items()
    ]
    return ledger, rows


def test_windows_that_are_right_balance() -> None:
    ledger, rows = shop()
    assert balance_windows(ledger, rows) == Books(expected=40, found=40)
    assert {row["start"].second % 5 for row in rows} == {0}


def test_an_order_that_is_missing_doubled_or_another_one_shows_in_the_windows() -> None:
    ledger, rows = shop()
    rows[3]["orders"] -= 1
    assert balance_windows(ledger, rows) == Books(expected=40, found=39, missing=1)
    rows[3]["orders"] += 2
    assert balance_windows(ledger, rows) == Books(expected=40, found=41, doubled=1)
    ledger, rows = shop()
    rows[3]["ids"] += 1
    assert balance_windows(ledger, rows).foreign == 1
    ledger, rows = shop()
    assert balance_windows(ledger, [*rows, rows[0]]).doubled == rows[0]["orders"]
    assert balance_windows(ledger, rows[1:]).missing == rows[0]["orders"]


def test_a_joined_order_that_is_missing_doubled_or_foreign_is_counted() -> None:
    ledger, _ = shop()
    found = Counter(ledger.joined)
    assert balance(ledger.joined, found).clean
    found[1], found[2] = 3, 1
    del found[3]
    assert balance(ledger.joined, found) == Books(expected=20, found=22, missing=1, doubled=2, foreign=1)


def test_only_the_files_in_the_log_of_the_parquet_sink_count(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    row = {"start": NOON, "region": "north", "orders": 1, "cents": 2, "ids": 3}
    for name in ("old", "a", "b", "orphan"):
        table = pa.Table.from_pylist([{**row, "region": name}])
        pq.write_table(table, tmp_path / f"{name}.parquet")

    def note(number: str, *names: str) -> None:
        lines = [json.dumps({"path": f"file://{tmp_path}/{name}.parquet", "action": "add"}) for name in names]
        (log / number).write_text("\n".join(["v1", *lines]))

    note("8", "old")
    note("9.compact", "a")
    note("10", "b")
    assert [(row["region"], row["start"]) for row in read_sales(tmp_path)] == [("a", NOON), ("b", NOON)]


def test_the_chart_is_a_picture_of_every_cell_and_mark(tmp_path: Path) -> None:
    _, rows = shop()
    cells = {(row["start"], row["region"]): row["cents"] / 100 for row in rows}
    write_chart(
        tmp_path / "x.svg", "Sales < all", cells, [(NOON + timedelta(seconds=9), "driver & broker")], 5
    )
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "Sales < all" in texts
    assert "driver & broker" in texts
    bars = [element for element in root.iter() if element.tag.endswith("rect")]
    windows, regions = {start for start, _ in cells}, {region for _, region in cells}
    assert len(bars) == 1 + len(windows) * len(regions) + len(regions)
