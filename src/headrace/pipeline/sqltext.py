"""What can be said of a SQL step without Spark: are quotes and brackets closed, and are the views it reads there.

Owns a light look at the text, no grammar: Spark has that. Invariant: what Spark takes is not refused here. Called by
`jobfile` before a JVM is started; Spark itself judges the rest before any data moves.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>`[^`]+`|[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>.)",
    re.DOTALL,
)
# Functions with a FROM of their own: extract(year FROM at), trim(BOTH 'x' FROM y), ...
_FROM_INSIDE = {"extract", "substring", "substr", "trim", "overlay"}
_NO_NAME = {"select", "values", "lateral", "unnest", "stream", "table", "only"}


@dataclass(frozen=True)
class Token:
    """A word or sign, and the line it is on, counted from the text's first."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and on which line of the text."""

    line: int
    what: str


def mistake_in(sql: str) -> Mistake | None:
    """A quote or bracket that is not closed, or None."""
    opened: list[Token] = []
    for token in _tokens(sql):
        if token.kind == "sign" and token.text in "'\"`":
            return Mistake(token.line, f"the quote {token.text} is not closed")
        if token.text == "(":
            opened.append(token)
        elif token.text == ")":
            if not opened:
                return Mistake(token.line, "a ) without its (")
            opened.pop()
    return Mistake(opened[-1].line, "a ( that is not closed") if opened else None


def views_read(sql: str) -> list[tuple[str, int]]:
    """The plain names after FROM and JOIN, each with its line; names the text defines itself (WITH) are left out."""
    tokens = list(_tokens(sql))
    own = {
        _plain(name)
        for name, word, sign in zip(tokens, tokens[1:], tokens[2:])
        if name.kind == "name" and word.text.lower() == "as" and sign.text == "("
    }
    found: list[tuple[str, int]] = []
    functions: list[str] = []
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else None
        if token.text == "(":
            functions.append(before.text.lower() if before is not None and before.kind == "name" else "")
        elif token.text == ")" and functions:
            functions.pop()
        word = token.text.lower()
        distinct = before is not None and before.text.lower() == "distinct" and at > 1
        is_distinct = distinct and tokens[at - 2].text.lower() in ("is", "not")
        inside = bool(functions) and functions[-1] in _FROM_INSIDE
        if word not in ("from", "join") or token.kind != "name" or is_distinct or inside:
            continue
        name, after = _at(tokens, at + 1), _at(tokens, at + 2)
        if name is None or name.kind != "name" or (after is not None and after.text in ("(", ".")):
            continue
        if _plain(name) not in own and _plain(name) not in _NO_NAME:
            found.append((name.text.strip("`"), name.line))
    return found


def _tokens(sql: str) -> Iterator[Token]:
    line = 0
    for match in _TOKEN.finditer(sql):
        if match.lastgroup != "space":
            yield Token(match.lastgroup or "", match[0], line)
        line += match[0].count("\n")


def _at(tokens: list[Token], at: int) -> Token | None:
    return tokens[at] if at < len(tokens) else None


def _plain(token: Token) -> str:
    return token.text.strip("`").lower()
