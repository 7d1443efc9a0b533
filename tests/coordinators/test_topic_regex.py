"""Regular expressions over topic names: Python's `re` agrees where both have a meaning, and no pattern is slow."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.coordinators.topic_regex import InvalidPattern, TopicRegex

PIECES = [
    "a",
    "b",
    ".",
    "-",
    "[ab]",
    "[^a]",
    r"\d",
    r"\w",
    r"\.",
    "(a|b)",
    "(?:ab)",
    "a*",
    "b+?",
    "a{1,2}",
    "^",
    "$",
]
patterns = st.lists(st.sampled_from([*PIECES, "(", ")*", "|"]), max_size=8).map("".join)
names = st.text(alphabet="ab.-1_", max_size=6)


@given(patterns, st.lists(names, min_size=1, max_size=10))
def test_it_matches_what_re_matches(pattern: str, tried: list[str]) -> None:
    try:
        ours = TopicRegex(pattern)
    except InvalidPattern:
        with pytest.raises(re.error):
            re.compile(pattern)
        return
    theirs = re.compile(pattern)
    for name in tried:
        assert ours.matches(name) == (theirs.fullmatch(name) is not None), (pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("orders", "orders-eu", False),
        ("(?i)ORDERS", "orders", True),
        ("(?i:A)b", "aB", False),
        ("[[:alpha:]]+", "orders", True),
        ("[[:^digit:]]+", "a1", False),
        (r"\Qa.b\E", "a.b", True),
        (r"\Qa.b\E", "axb", False),
        (r"\pL+", "orders", True),
        (r"\p{Nd}{4}", "2026", True),
        (r"\x61+", "aaa", True),
        (r"(?P<name>a)\b.*", "a-b", True),
        ("", "a", False),
    ],
)
def test_it_has_what_re2_has(pattern: str, name: str, matches: bool) -> None:
    assert TopicRegex(pattern).matches(name) is matches


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "[",
        "[b-a]",
        "a**",
        "*a",
        "(?=a)",
        "(?<!a)",
        r"\1",
        "a{2,1}",
        "a{1001}",
        "(?P<",
        r"\p{Klingon}",
        "\\",
    ],
)
def test_what_re2_does_not_have_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        TopicRegex(pattern)


@pytest.mark.parametrize("pattern", ["((a{100}){100}){100}", "a" * 3000, "(" * 200 + "a" + ")" * 200])
def test_what_would_grow_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        TopicRegex(pattern)


def test_nested_repetitions_do_not_backtrack() -> None:
    assert not TopicRegex("(a*)*(a+a+)+b").matches("a" * 249)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.coordinators.topic_regex.REMEMBERED_STEPS_MAX", 10)
    regex = TopicRegex("(a|b)*a(a|b)(a|b)(a|b)")
    for number in range(64):
        name = f"{number:06b}".replace("0", "a").replace("1", "b")
        assert regex.matches(name) == (name[2] == "a")
        assert len(regex._steps) <= 10


def test_other_names_may_have_other_characters() -> None:
    alphabet = frozenset("ab /:")
    assert TopicRegex("a.b", alphabet).matches("a:b")
    assert TopicRegex(r"a\sb", alphabet).matches("a b")
    assert TopicRegex("a[^:]b", alphabet).matches("a/b")
    assert not TopicRegex("a[^:]b", alphabet).matches("a:b")
    assert not TopicRegex("a.b").matches("a:b")
