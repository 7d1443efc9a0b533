"""What a run tells of itself, made of what Spark tells, and how it is shown."""

import json
import urllib.error
import urllib.request
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.pipeline_view import Reporter, drawn
from headrace.pipeline.progress import Totals, summarize
from headrace.pipeline.spark_errors import failure


def offsets(**topics: dict[str, int]) -> str:
    return json.dumps(
        {
            "version": 1,
            "topics": {name: {"id": "", "offsets": at, "epochs": {}} for name, at in topics.items()},
        }
    )


def progress(batch: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "batchId": batch,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "numInputRows": 500,
        "durationMs": {"triggerExecution": 250},
        "eventTime": {"watermark": "2026-01-01T00:00:00.000Z"},
        "stateOperators": [
            {"numRowsTotal": 7, "memoryUsedBytes": 100},
            {"numRowsTotal": 5, "memoryUsedBytes": 50},
        ],
        "sources": [
            {
                "latestOffset": offsets(orders={"0": 100, "1": 70}, **{"a/b": {"0": 5}}),
                "endOffset": offsets(orders={"0": 90, "1": 70}),
            }
        ],
        "sink": {"numOutputRows": -1},
        "observedMetrics": {"headrace_out": {"rows": 20}},
        **more,
    }


def test_a_batch_is_told_in_a_few_numbers() -> None:
    event = summarize("shop-0-paid", progress())
    assert (event["rows_in"], event["rows_out"], event["batch_ms"]) == (500, 20, 250)
    assert (event["rows_in_per_s"], event["rows_out_per_s"]) == (2000.0, 80.0)
    assert (event["state_rows"], event["state_bytes"]) == (12, 150)
    assert event["lag"] == {"orders": 10, "a/b": 5}
    assert event["watermark"] == "2026-01-01T00:00:00.000Z"


def test_what_spark_leaves_out_is_nothing() -> None:
    bare = progress(eventTime={}, stateOperators=[], observedMetrics={}, durationMs={}, numInputRows=None)
    bare["sources"] = [{"latestOffset": None, "endOffset": '"odd"'}]
    event = summarize("q", bare)
    assert (event["rows_out"], event["rows_in_per_s"], event["lag"], event["watermark"]) == (0, 0.0, {}, None)


@pytest.mark.parametrize(
    "row", [{}, ()]
)  # through Spark Connect, a batch may come with a row without columns
def test_a_count_without_columns_is_nothing(row: Any) -> None:
    assert summarize("q", progress(observedMetrics={"headrace_out": row}))["rows_out"] == 0


def totals() -> Totals:
    found = Totals()
    for batch in (1, 2):
        found.add(summarize('odd"name', progress(batch)))
    found.add(summarize("shop-dead", progress(observedMetrics={"headrace_out": {"rows": 3}}, eventTime={})))
    return found


def test_metrics_are_prometheus_text() -> None:
    lines = totals().prometheus().splitlines()
    assert 'headrace_pipeline_rows_in_total{query="odd\\"name"} 1000' in lines
    assert 'headrace_pipeline_rows_out_per_second{query="shop-dead"} 12.0' in lines
    assert 'headrace_pipeline_lag{query="shop-dead",topic="orders"} 10' in lines
    assert 'headrace_pipeline_watermark_seconds{query="odd\\"name"} 1767225600.0' in lines
    assert not any("watermark" in line and "shop-dead" in line for line in lines)
    assert "headrace_pipeline_dead_letters_total 3" in lines
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    for line in lines:
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0


def test_metrics_are_scraped_from_a_port_and_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.prom"
    with Reporter(as_json=True, metrics_file=path) as reporter:
        port = reporter.serve(0)
        reporter.report(summarize("q", progress()))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        scraped = reply.read().decode()
    assert 'headrace_pipeline_batch{query="q"} 3' in scraped
    assert path.read_text() == scraped
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["query"] == "q"


def test_a_metrics_file_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Reporter(as_json=True, metrics_file=tmp_path / "no" / "where") as reporter:
        reporter.report(summarize("q", progress(1)))
        reporter.report(summarize("q", progress(2)))
    assert capsys.readouterr().err.count("No such file") == 1


def test_a_terminal_is_shown_every_number() -> None:
    out = StringIO()
    Console(file=out, width=200).print(drawn("shop  Spark 4 on local[2]", totals()))
    text = out.getvalue()
    for part in (
        "2,000",
        "80",
        "0.25 s",
        "a/b 5, orders 10",
        "12 rows",
        "2026-01-01 00:00:00",
        "3 dead letters",
    ):
        assert part in text


def test_a_failed_query_is_told_in_two_lines() -> None:
    text = (
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [PYTHON_STREAMING_DATA_SOURCE_ERROR] "
        "Failed when Python streaming data source perform latestOffset: Traceback (most recent call last):\n"
        '  File "x.py", line 3, in latestOffset\n    raise lost\n'
        "headrace.pipeline.source.DataLoss: orders-0 is gone; the query was at offset 5.\n"
        " SQLSTATE: 38000\n"
        "=== Streaming Query ===\nIdentifier: shop [id = 1]\n"
    )
    first, second = failure(text.replace("Identifier", "  Identifier")).splitlines()
    assert first.startswith("[STREAM_FAILED] Query [id = 1, runId = 2]")
    assert first.endswith("perform latestOffset:")
    assert second == "  DataLoss: orders-0 is gone; the query was at offset 5."
    assert failure("[TABLE_NOT_FOUND] no table x. SQLSTATE: 42P01\nJVM stacktrace:\na.B: c") == (
        "[TABLE_NOT_FOUND] no table x."
    )
    assert "too busy" in failure(
        "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"
    )
    text = "Failed to initialize writer: Traceback (most recent call last):\n"
    text += "_pickle.PicklingError: Could not serialize object: Disconnected: cannot connect to 127.0.0.1:1\n"
    assert failure(text).splitlines()[1] == "  Disconnected: cannot connect to 127.0.0.1:1"
