"""The benchmark's table says what the numbers say: ratios by medians, aims met or missed in the right direction."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import CLUSTER_MEASURES, MEASURES, Measure, Row, chart, markdown, rows_of

MORE = Measure("rate", "rate (msg/s)", True, ratio_aim=1.5, digits=0)
LESS = Measure("cpu", "cpu (s)", False, ratio_aim=0.5)
BOTH = Measure("rate", "rate (a second)", True, ratio_aim=1.0, value_aim=20_000.0)
AT_MOST = Measure("start", "start (s)", False, value_aim=0.5)


def test_a_ratio_compares_medians_and_not_the_best_run() -> None:
    assert Row(MORE, [100.0, 300.0, 900.0], [100.0, 150.0, 200.0]).ratio == 2.0


def test_an_aim_is_met_in_the_direction_that_is_better() -> None:
    assert Row(MORE, [150.0], [100.0]).met is True
    assert Row(MORE, [149.0], [100.0]).met is False
    assert Row(LESS, [5.0], [10.0]).met is True
    assert Row(LESS, [5.1], [10.0]).met is False
    assert Row(AT_MOST, [0.5], []).met is True
    assert Row(AT_MOST, [0.6], [9.0]).met is False


def test_a_measure_with_two_aims_has_to_reach_both() -> None:
    assert Row(BOTH, [20_000.0], [10_000.0]).met is True
    assert Row(BOTH, [19_999.0], [10_000.0]).met is False
    assert Row(BOTH, [30_000.0], [40_000.0]).met is False
    assert Row(BOTH, [], []).aim == "≥ 1 ×, ≥ 20 000"


def test_without_kafka_a_ratio_cannot_be_told() -> None:
    row = Row(MORE, [100.0], [])
    assert row.ratio is None
    assert row.met is None
    assert row.shown(row.kafka) == "-"


def test_the_spread_of_the_runs_is_shown_beside_the_median() -> None:
    assert Row(MORE, [1500.0, 1000.0, 2000.0], []).shown([1500.0, 1000.0, 2000.0]) == "1 500 (1 000 to 2 000)"


def test_the_table_and_the_chart_hold_every_measure_that_was_taken() -> None:
    measures = (*MEASURES, *CLUSTER_MEASURES)
    results = {
        "Headrace": {measure.key: [2.0] for measure in measures},
        "Kafka": {measure.key: [1.0] for measure in measures},
    }
    assert len(rows_of(results)) == len(measures)
    assert all(measure.words in markdown(results, 1) for measure in measures)
    bars = ElementTree.fromstring(chart(results)).findall("{http://www.w3.org/2000/svg}rect")
    compared = [measure for measure in measures if measure.compared]
    assert len(bars) == len(compared) + 1  # and the background
    assert chart({"Headrace": results["Headrace"]}) == ""


def test_what_a_client_reaches_at_most_stands_beside_what_it_reached() -> None:
    rate = MEASURES[0]
    brokers = {"Headrace": {rate.key: [200.0]}, "Kafka": {rate.key: [100.0]}}
    table = markdown({**brokers, "Sink": {rate.key: [250.0]}}, 1).splitlines()
    assert "stores nothing" in table[2]
    assert table[4].endswith("| 250 |")
    assert len({line.count("|") for line in table[2:]}) == 1
    assert "stores nothing" not in markdown(brokers, 1)


def test_what_was_recorded_the_same_day_and_is_not_measured_again_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    (tmp_path / "README.md").write_text("a\n<!-- cluster -->\nold\n<!-- end of cluster -->\nz\n")
    kill, stop = "write gap after a kill s", "write gap after a stop s"
    report.record({"Headrace": {kill: [0.7], stop: [0.2]}}, 3, "cluster")
    report.record({"Headrace": {kill: [0.5]}, "Kafka": {kill: [9.0]}}, 3, "cluster")
    page = (tmp_path / "README.md").read_text()
    assert "| 0.50 | 9.00 |" in page and "| 0.20 | - |" in page and "0.70" not in page
    assert page.startswith("a\n") and page.endswith("z\n")
    file = tmp_path / "cluster.json"
    file.write_text(file.read_text().replace('"date": "2', '"date": "1'))
    report.record({"Headrace": {kill: [0.5]}}, 3, "cluster")
    assert "| 0.20 |" not in (tmp_path / "README.md").read_text(), "of another day"
