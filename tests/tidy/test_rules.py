"""Every rule of the tidy test bites: a planted violation is found, and the like that is allowed is not."""

import pytest

from tests.tidy import rules
from tests.tidy.rules import Source

DOC = '"""Owns a planted file for a rule to find."""\n'


def planted(path: str, body: str) -> Source:
    return Source(path, DOC + body)


CASES = [
    (rules.layer_is_known, "extras/a.py", "", "storage/a.py", ""),
    (
        rules.imports_go_downward,
        "storage/a.py",
        "from headrace.server.broker import Broker\n",
        "storage/a.py",
        "from headrace.records.batch import BatchHeader\n",
    ),
    (
        rules.imports_go_downward,
        "client/a.py",
        "def f():\n    import headrace.server.session\n",
        "client/a.py",
        "from headrace.wire import messages\n",
    ),
    (
        rules.imports_go_downward,
        "testing/a.py",
        "from headrace import server\n",
        "cli/a.py",
        "from headrace import server\n",
    ),
    (
        rules.imports_go_downward,
        "__init__.py",
        "from headrace.wire import frames\n",
        "__main__.py",
        "from headrace.cli.main import main\n",
    ),
    (rules.world_is_met_at_the_edges, "storage/log.py", "import time\n", "base/clock.py", "import time\n"),
    (
        rules.world_is_met_at_the_edges,
        "cluster/a.py",
        "from uuid import uuid4\n",
        "server/listener_tcp.py",
        "import asyncio\n",
    ),
    (
        rules.world_is_met_at_the_edges,
        "server/handlers/a.py",
        "import os\nsalt = os.urandom(4)\n",
        "server/handlers/a.py",
        "import os\nhere = os.getcwd()\n",
    ),
    (
        rules.dependencies_are_declared,
        "wire/a.py",
        "import kio\n",
        "wire/a.py",
        "import struct\nimport msgspec\n",
    ),
    (
        rules.dependencies_are_declared,
        "server/a.py",
        "from rich.table import Table\n",
        "cli/a.py",
        "from rich.table import Table\n",
    ),
    (rules.module_is_short, "base/a.py", "x = 1\n" * rules.LINES_MAX, "base/a.py", "x = 1\n"),
    (rules.module_has_a_name, "base/utils.py", "", "base/limits.py", ""),
    (rules.only_the_command_line_prints, "server/a.py", "print(1)\n", "cli/a.py", "print(1)\n"),
    (
        rules.name_is_a_statement,
        "tests/a.py",
        "def test_log():\n    assert 1\n",
        "tests/a.py",
        "def test_log_keeps_order():\n    assert 1\n",
    ),
    (
        rules.waits_without_sleeping,
        "tests/a.py",
        "import time\ntime.sleep(0.1)\n",
        "tests/a.py",
        "import asyncio\nasyncio.sleep(0)\n",
    ),
]


@pytest.mark.parametrize(("rule", "bad_path", "bad", "good_path", "good"), CASES)
def test_a_rule_finds_the_planted_violation_and_nothing_else(rule, bad_path, bad, good_path, good) -> None:
    assert len(list(rule(planted(bad_path, bad)))) == 1
    assert list(rule(planted(good_path, good))) == []


def test_a_module_without_a_docstring_is_found() -> None:
    assert list(rules.module_says_what_it_owns(Source("base/a.py", "x = 1\n")))
    assert list(rules.module_says_what_it_owns(Source("base/a.py", '"""Hm."""\n')))
    assert not list(rules.module_says_what_it_owns(planted("base/a.py", "x = 1\n")))


@pytest.mark.parametrize(
    "line",
    [
        "data = '/wor" + "k/main'",
        "see /roo" + "t/.cache",
        "# as asked in issue" + " 12",
        "# as asked in issue" + " #12",
        "# TO" + "DO: later",
    ],
)
def test_forbidden_words_are_found_in_any_file(line: str) -> None:
    assert len(list(rules.text_is_clean("docs/a.md", f"fine\n{line}\nfine\n"))) == 1


def test_ordinary_text_holds_no_forbidden_word() -> None:
    assert not list(
        rules.text_is_clean("a.md", "the root/ of the work/ is ./wor" + "k/x; issues are welcome; todo\n")
    )


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://example.invalid/simple",
        "rich @ https://example.invalid/rich.whl",
        "rich>=13",
        "rich==13.1",
    ],
)
def test_a_pin_without_hash_or_with_an_address_is_found(line: str) -> None:
    assert len(list(rules.pins_hold_no_address("requirements/dev.txt", f"{line}\n"))) == 1


def test_a_pin_with_a_version_and_hashes_is_fine() -> None:
    text = "uvloop==0.21.0 ; sys_platform != 'win32' \\\n    --hash=sha256:00\n"
    assert not list(rules.pins_hold_no_address("requirements/dev.txt", text))


def test_every_rule_is_shown_to_bite() -> None:
    shown = {case[0] for case in CASES} | {rules.module_says_what_it_owns}
    assert shown == {*rules.RULES, *rules.TEST_RULES}


def test_every_layer_may_import_only_what_lies_below_it() -> None:
    for layer in rules.LAYERS:
        below = rules.allowed_layers(layer) - {layer}
        assert below <= set(rules.LAYERS[: rules.LAYERS.index(layer)])
