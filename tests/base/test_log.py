"""Log lines: structured, quiet by default, with the request they belong to."""

import io
import json
import logging

import pytest

from headrace.base.log import configure, correlation, get_logger


@pytest.fixture(autouse=True)
def _restored():
    root = logging.getLogger("headrace")
    before = root.handlers[:], root.level, root.propagate
    token = correlation.set(None)  # a router that another test called directly leaves its request here
    yield
    correlation.reset(token)
    root.handlers[:], root.level, root.propagate = before


def test_a_line_of_json_holds_the_event_its_fields_and_the_request():
    stream = io.StringIO()
    configure("INFO", as_json=True, stream=stream)
    token = correlation.set("7/console/42")
    get_logger("headrace.storage.log").info("segment rolled", extra={"fields": {"topic": "t", "offset": 5}})
    correlation.reset(token)
    line = json.loads(stream.getvalue())
    assert (line["event"], line["topic"], line["offset"]) == ("segment rolled", "t", 5)
    assert (line["level"], line["logger"], line["request"]) == (
        "INFO",
        "headrace.storage.log",
        "7/console/42",
    )


def test_a_line_of_text_ends_with_its_fields():
    stream = io.StringIO()
    configure("INFO", stream=stream)
    get_logger("headrace.server").warning("full", extra={"fields": {"host": "h"}})
    assert stream.getvalue().rstrip().endswith("WARNING server: full host=h")


def test_nothing_below_a_warning_is_said_unless_asked_for():
    stream = io.StringIO()
    configure(stream=stream)
    get_logger("headrace.server").info("hello")
    assert stream.getvalue() == ""


def _say(logger: logging.Logger, at_s: float, event: str, **fields: object) -> None:
    record = logger.makeRecord(logger.name, logging.ERROR, "", 0, event, (), None, extra={"fields": fields})
    record.created = at_s
    logger.handle(record)


def test_an_error_that_clients_cause_again_and_again_does_not_fill_the_log():
    stream = io.StringIO()
    configure("INFO", as_json=True, stream=stream)
    logger = get_logger("headrace.storage.log")
    token = correlation.set("7/console/42")
    for number in range(1000):
        _say(logger, 100.0 + number / 100, "write refused", partition=f"t-{number}")
    _say(logger, 101.0, "read failed", partition="t-0")
    _say(logger, 161.0, "write refused", partition="t-0")
    correlation.reset(token)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["write refused"] * 10 + ["read failed", "write refused"]
    assert lines[-1]["unwritten"] == 990
    assert "unwritten" not in lines[0]


def test_each_partition_that_a_recovery_speaks_of_has_its_line():
    stream = io.StringIO()
    configure("INFO", as_json=True, stream=stream)
    for number in range(100):
        _say(get_logger("headrace.storage.recovery"), 100.0, "log truncated", partition=f"t-{number}")
    assert len(stream.getvalue().splitlines()) == 100
    for _ in range(100):
        _say(get_logger("headrace.storage"), 100.0, "offset checkpoints cannot be written", why="full")
    assert len(stream.getvalue().splitlines()) == 110


def test_lines_below_a_warning_are_as_many_as_were_asked_for():
    stream = io.StringIO()
    configure("INFO", stream=stream)
    for _ in range(100):
        get_logger("headrace.server").info("hello")
    assert len(stream.getvalue().splitlines()) == 100
