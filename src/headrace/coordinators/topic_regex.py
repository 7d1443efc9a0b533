"""Regular expressions over names of topics and other things that the broker resolves: RE2's syntax, at a bounded cost.

A pattern becomes a nondeterministic automaton, and that, as names are matched, a deterministic one whose states are
remembered. A name of n characters costs n steps whatever the pattern is: nothing backtracks, so a member cannot slow
down the broker with one. Only characters that can occur count, which keeps classes small: those that may stand in a
topic's name, unless others are given. A pattern must match the whole name. Invariants: automata and what is remembered
of them are bounded, by the names below. What RE2 does not have (back references, looking around) is refused. Python's
`re` is not used because it backtracks.

Syntax: literals and escapes, `.`, classes with ranges, `[:alpha:]` and negation, `\\d \\w \\s` and their opposites,
`\\pL`, `\\Q...\\E`, groups (capturing, named, with flags), alternatives, `* + ? {n} {n,} {n,m}` (lazy ones too),
`^ $ \\A \\z \\b \\B`. The flag i counts; s, m and U are accepted and mean nothing for a whole name of one line.
"""

import string
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

PATTERN_LENGTH_MAX: Final = 2000
DEPTH_MAX: Final = 100
REPEAT_MAX: Final = 1000
STATES_MAX: Final = 4000
REMEMBERED_STEPS_MAX: Final = 20_000
COMPILED_MAX: Final = 128

LEGAL: Final = frozenset(string.ascii_letters + string.digits + "._-")
WORD: Final = frozenset(string.ascii_letters + string.digits + "_")
_ESCAPES: Final = {
    "d": frozenset(string.digits),
    "w": WORD,
    "s": frozenset(" \t\n\f\r"),
}
_CONTROL: Final = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_NAMED: Final = {
    "alnum": frozenset(string.ascii_letters + string.digits),
    "alpha": frozenset(string.ascii_letters),
    "ascii": frozenset(map(chr, range(128))),
    "blank": frozenset(" \t"),
    "cntrl": frozenset(map(chr, (*range(32), 127))),
    "digit": frozenset(string.digits),
    "graph": frozenset(map(chr, range(33, 127))),
    "lower": frozenset(string.ascii_lowercase),
    "print": frozenset(map(chr, range(32, 127))),
    "punct": frozenset(string.punctuation),
    "space": frozenset(" \t\n\v\f\r"),
    "upper": frozenset(string.ascii_uppercase),
    "word": WORD,
    "xdigit": frozenset(string.hexdigits),
}
_ASSERTIONS: Final = {"A": "^", "z": "$", "b": "b", "B": "B"}
Parsed: TypeAlias = Callable[["_Automaton", int], int]
"""A part of a pattern: builds itself in front of a state, and says where it begins."""


class InvalidPattern(Exception):
    """Why a pattern is refused."""


class _State(NamedTuple):
    """Reads one of some characters, or checks where it stands, or only branches; and goes on."""

    reads: frozenset[str] | None
    asserts: str
    next: tuple[int, ...]


class _Automaton:
    def __init__(self) -> None:
        self.states: list[_State] = [_State(None, "", ())]  # the first is where a match ends

    def add(self, reads: frozenset[str] | None, asserts: str, *next_states: int) -> int:
        if len(self.states) >= STATES_MAX:
            raise InvalidPattern("the pattern is too large")
        self.states.append(_State(reads, asserts, next_states))
        return len(self.states) - 1


class TopicRegex:
    """A pattern, ready to match names."""

    def __init__(self, pattern: str, alphabet: frozenset[str] = LEGAL) -> None:
        """`alphabet` holds all characters that can occur in what is matched."""
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise InvalidPattern(f"the pattern is longer than {PATTERN_LENGTH_MAX} characters")
        automaton = _Automaton()
        self._start = frozenset({_Parser(pattern, alphabet).parse()(automaton, 0)})
        self._states = automaton.states
        self._steps: dict[tuple[frozenset[int], str, str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Whether the whole name matches."""
        at, before = self._start, ""
        for character in name:
            at = self._step(at, before, character)
            if not at:
                return False
            before = character
        return 0 in self._closure(at, before, "")

    def _step(self, at: frozenset[int], before: str, character: str) -> frozenset[int]:
        key = (at, before and ("w" if before in WORD else "."), character)
        found = self._steps.get(key)
        if found is None:
            if len(self._steps) >= REMEMBERED_STEPS_MAX:
                self._steps.clear()
            reached: set[int] = set()
            for number in self._closure(at, before, character):
                state = self._states[number]
                if state.reads is not None and character in state.reads:
                    reached.update(state.next)
            found = self._steps[key] = frozenset(reached)
        return found

    def _closure(self, at: frozenset[int], before: str, after: str) -> set[int]:
        """All states that are reached without reading, between two characters (or at an end)."""
        seen = set(at)
        waiting = list(at)
        while waiting:
            state = self._states[waiting.pop()]
            if state.reads is None and _holds(state.asserts, before, after):
                for number in state.next:
                    if number not in seen:
                        seen.add(number)
                        waiting.append(number)
        return seen


@lru_cache(maxsize=COMPILED_MAX)
def compiled(pattern: str) -> TopicRegex:
    """A pattern, compiled once for all who use it."""
    return TopicRegex(pattern)


def _holds(what: str, before: str, after: str) -> bool:
    if what == "^":
        return not before
    if what == "$":
        return not after
    if what in ("b", "B"):
        return ((before in WORD) != (after in WORD)) == (what == "b")
    return True


# -- parts of a pattern ------------------------------------------------------------------------------------------------


def _reading(characters: frozenset[str]) -> Parsed:
    return lambda automaton, after: automaton.add(characters, "", after)


def _asserting(what: str) -> Parsed:
    return lambda automaton, after: automaton.add(None, what, after)


def _sequence(parts: list[Parsed]) -> Parsed:
    def build(automaton: _Automaton, after: int) -> int:
        for part in reversed(parts):
            after = part(automaton, after)
        return after

    return build


def _alternatives(parts: list[Parsed]) -> Parsed:
    if len(parts) == 1:
        return parts[0]
    return lambda automaton, after: automaton.add(None, "", *[part(automaton, after) for part in parts])


def _repeated(part: Parsed, least: int, most: int | None) -> Parsed:
    def build(automaton: _Automaton, after: int) -> int:
        if most is None:
            loop = automaton.add(None, "")
            entry = part(automaton, loop)
            automaton.states[loop] = _State(None, "", (entry, after))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = automaton.add(None, "", part(automaton, after), end)
        for _ in range(least):
            after = part(automaton, after)
        return after

    return build


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, alphabet: frozenset[str]) -> None:
        self._text = pattern
        self._alphabet = alphabet
        self._pos = 0
        self._depth = 0

    def parse(self) -> Parsed:
        parsed = self._either(False)
        if self._pos < len(self._text):
            raise InvalidPattern("unexpected )")
        return parsed

    def _peek(self) -> str:
        return self._text[self._pos : self._pos + 1]

    def _take(self) -> str:
        if self._pos >= len(self._text):
            raise InvalidPattern("the pattern ends too early")
        self._pos += 1
        return self._text[self._pos - 1]

    def _accept(self, text: str) -> bool:
        found = self._text.startswith(text, self._pos)
        self._pos += len(text) if found else 0
        return found

    def _until(self, end: str) -> str:
        at = self._text.find(end, self._pos)
        if at < 0:
            raise InvalidPattern(f"missing {end}")
        found, self._pos = self._text[self._pos : at], at + len(end)
        return found

    def _either(self, folded: bool) -> Parsed:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise InvalidPattern("groups are nested too deep")
        parts: list[Parsed] = []
        ways: list[Parsed] = []
        while self._pos < len(self._text) and self._peek() != ")":
            if self._accept("|"):
                ways.append(_sequence(parts))
                parts = []
            elif self._accept("(?"):
                folded, group = self._flagged(folded)
                if group is not None:
                    parts.append(self._quantified(group))
            else:
                parts.append(self._quantified(self._atom(folded)))
        ways.append(_sequence(parts))
        self._depth -= 1
        return _alternatives(ways)

    def _group(self, folded: bool) -> Parsed:
        inner = self._either(folded)
        if not self._accept(")"):
            raise InvalidPattern("missing )")
        return inner

    def _flagged(self, folded: bool) -> tuple[bool, Parsed | None]:
        """After `(?`: flags for the rest of the group around, or a group that has a name or flags of its own."""
        if self._accept("P<") or (self._accept("<") and self._peek() not in ("=", "!")):
            name = self._until(">")
            if not name or not all(each in WORD for each in name):
                raise InvalidPattern(f"invalid name of a group: {name!r}")
            return folded, self._group(folded)
        mine, on = folded, True
        while True:
            flag = self._take()
            if flag == ":":
                return folded, self._group(mine)
            if flag == ")":
                return mine, None
            if flag == "-" and on:
                on = False
            elif flag == "i":
                mine = on
            elif flag not in "msU":
                raise InvalidPattern(f"(?{flag} is not supported")

    def _atom(self, folded: bool) -> Parsed:
        character = self._take()
        if character == "(":
            return self._group(folded)
        if character == ".":
            return _reading(self._alphabet)
        if character in "^$":
            return _asserting(character)
        if character == "[":
            return _reading(self._class(folded))
        if character in "*+?":
            raise InvalidPattern(f"nothing to repeat before {character}")
        if character == "\\":
            return self._escape(folded)
        return _reading(_fold(frozenset(character), folded))

    def _escape(self, folded: bool) -> Parsed:
        if self._accept("Q"):
            end = self._text.find("\\E", self._pos)
            quoted = self._text[self._pos :] if end < 0 else self._text[self._pos : end]
            self._pos = len(self._text) if end < 0 else end + 2
            return _sequence([_reading(_fold(frozenset(each), folded)) for each in quoted])
        if self._peek() in _ASSERTIONS and self._peek():
            return _asserting(_ASSERTIONS[self._take()])
        return _reading(_fold(self._escaped(), folded))

    def _escaped(self) -> frozenset[str]:
        """The characters that an escape stands for, in or outside of a class."""
        letter = self._take()
        if letter.lower() in _ESCAPES:
            found = _ESCAPES[letter.lower()]
            return found if letter.islower() else self._alphabet - found
        if letter.lower() == "p":
            return self._category(letter == "P")
        if letter == "x":
            digits = self._until("}") if self._accept("{") else self._take() + self._take()
            return frozenset(_character(digits, 16))
        if letter == "0":
            digits = letter
            while len(digits) < 3 and self._peek() and self._peek() in string.octdigits:
                digits += self._take()
            return frozenset(_character(digits, 8))
        if letter in _CONTROL:
            return frozenset(_CONTROL[letter])
        if letter.isalnum():
            raise InvalidPattern(f"\\{letter} is not supported")
        return frozenset(letter)

    def _category(self, negated: bool) -> frozenset[str]:
        name = self._until("}") if self._accept("{") else self._take()
        if name.startswith("^"):
            name, negated = name[1:], not negated
        if name == "Latin":
            found = frozenset(string.ascii_letters)
        elif name[:1] in tuple("LMNPSZC") and len(name) <= 2:
            found = frozenset(each for each in self._alphabet if unicodedata.category(each).startswith(name))
        else:
            raise InvalidPattern(f"\\p{{{name}}} is not supported")
        return self._alphabet - found if negated else found

    def _class(self, folded: bool) -> frozenset[str]:
        negated = self._accept("^")
        found: frozenset[str] = frozenset()
        first = True
        while first or self._peek() != "]":
            first = False
            if self._accept("[:"):
                name = self._until(":]")
                inner = _NAMED.get(name.removeprefix("^"))
                if inner is None:
                    raise InvalidPattern(f"[:{name}:] is not supported")
                found |= self._alphabet - inner if name.startswith("^") else inner
                continue
            character = self._take()
            low = self._escaped() if character == "\\" else frozenset(character)
            if self._text[self._pos : self._pos + 1] == "-" and self._text[
                self._pos + 1 : self._pos + 2
            ] not in (
                "]",
                "",
            ):
                self._pos += 1
                character = self._take()
                high = self._escaped() if character == "\\" else frozenset(character)
                if len(low) != 1 or len(high) != 1 or min(low) > min(high):
                    raise InvalidPattern("a range of a class is the wrong way round")
                first_code, last_code = ord(min(low)), ord(min(high))
                found |= frozenset(each for each in self._alphabet if first_code <= ord(each) <= last_code)
            else:
                found |= low
        self._pos += 1
        found = _fold(found, folded)
        return self._alphabet - found if negated else found

    def _quantified(self, part: Parsed) -> Parsed:
        bounds = self._bounds()
        if bounds is None:
            return part
        self._accept("?")
        if self._bounds() is not None:
            raise InvalidPattern("a repetition is repeated")
        return _repeated(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return bounds
        end = self._text.find("}", self._pos)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._text[self._pos + 1 : end].partition(",")
        if not (low.isdecimal() and low.isascii()) or (high and not (high.isdecimal() and high.isascii())):
            return None  # a brace that begins no repetition stands for itself
        least = int(low[:5])
        most = None if comma and not high else int((high or low)[:5])
        if max(least, most or 0) > REPEAT_MAX or (most is not None and most < least):
            raise InvalidPattern("bad bounds of a repetition")
        self._pos = end + 1
        return least, most


def _fold(characters: frozenset[str], folded: bool) -> frozenset[str]:
    if not folded:
        return characters
    return frozenset(form for each in characters for form in (each.lower(), each.upper()))


def _character(digits: str, base: int) -> str:
    try:
        return chr(int(digits, base))
    except (ValueError, OverflowError):
        raise InvalidPattern(f"{digits} is no code of a character") from None
