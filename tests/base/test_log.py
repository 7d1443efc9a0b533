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
    yield
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
