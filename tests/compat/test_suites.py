"""The lists of foreign suites stay well formed: every test named once, in order, every skip with its reason."""

import pytest

from tests.compat.suites import SUITES, Entry, parse_line, parse_results, read_list


@pytest.mark.parametrize("suite", SUITES)
def test_every_listed_test_is_named_once_and_in_order(suite: str) -> None:
    names = [entry.name for entry in read_list(suite)]
    assert names == sorted(set(names))


@pytest.mark.parametrize("suite", SUITES)
def test_a_list_holds_both_what_runs_and_what_is_left_out(suite: str) -> None:
    entries = read_list(suite)
    assert any(entry.run for entry in entries)
    assert all(entry.reason for entry in entries if not entry.run)


def test_a_running_entry_may_name_its_scenario() -> None:
    assert parse_line("run   0111_x   @noautocreate") == Entry("0111_x", run=True, scenario="noautocreate")
    assert parse_line("run 0001_x") == Entry("0001_x", run=True)
    assert parse_line("# a remark") is None


@pytest.mark.parametrize("line", ["skip 0018_x", "run 0001_x because", "maybe 0001_x", "0001_x"])
def test_a_line_that_says_too_little_or_too_much_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse_line(line)


def test_results_are_read_from_lines_of_either_suite() -> None:
    results = parse_results(
        "passed  0001_multiobj                       1.3 s  \n"
        "failed  test_a::test_b[zstd]                0.4 s  no end in time [/tmp/x.log]\n"
        "passed  rebalance, group protocol classic                      50.1 s  \n"
        "2 passed, 1 failed, 0 skipped\n"
    )
    assert {name: r.state for name, r in results.items()} == {
        "0001_multiobj": "passed",
        "test_a::test_b[zstd]": "failed",
        "rebalance,_group_protocol_classic": "passed",
    }
