"""The lists of foreign test suites: which of their tests Headrace is held to, and why the others are left out.

A list is a text file beside this module: one line a test (`run NAME [@SCENARIO]` or `skip NAME REASON`), with `_` for
the blanks in a name. The suites are not part of this repository; `run` beside this module starts a broker or a cluster
and hands the listed tests to a suite.
"""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITES = ("librdkafka", "librdkafka-consumer", "kafka-python", "java-tools")
DEFAULT_SCENARIO = "default"


@dataclass(frozen=True, slots=True)
class Entry:
    """One test of a foreign suite."""

    name: str
    run: bool
    scenario: str = DEFAULT_SCENARIO
    reason: str = ""


def parse_line(line: str) -> Entry | None:
    """One line of a list; None for a comment. Anything else that does not read as an entry is an error."""
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    found = re.fullmatch(r"(run|skip)\s+(\S+)(?:\s+(\S.*))?", text)
    if not found:
        raise ValueError(f"neither run NAME nor skip NAME REASON: {line!r}")
    verdict, name, rest = found.group(1), found.group(2), found.group(3) or ""
    if verdict == "skip":
        if not rest:
            raise ValueError(f"{name} is skipped without a reason")
        return Entry(name, run=False, reason=rest)
    if rest and not re.fullmatch(r"@\w+", rest):
        raise ValueError(f"{name}: after a test that runs comes only @SCENARIO, not {rest!r}")
    return Entry(name, run=True, scenario=rest.removeprefix("@") or DEFAULT_SCENARIO)


def read_list(suite: str) -> list[Entry]:
    """All entries of one suite's list, in the order of the file."""
    lines = (HERE / f"{suite}.txt").read_text().splitlines()
    return [entry for line in lines if (entry := parse_line(line))]


@dataclass(frozen=True, slots=True)
class Result:
    """What a suite's script said of one test."""

    name: str
    state: str
    detail: str


def parse_results(output: str) -> dict[str, Result]:
    """Results by test name from a suite script's output: lines `passed NAME 1.2 s WHY`."""
    found: dict[str, Result] = {}
    for line in output.splitlines():
        row = re.match(r"(passed|failed|skipped)\s*(\S.*?)\s+([\d.]+) s(?:\s+(.*))?$", line)
        if row:
            name = row.group(2).replace(" ", "_")
            found[name] = Result(name, row.group(1), row.group(4) or "")
    return found
