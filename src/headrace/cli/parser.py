"""Command-line parsing that every command shares: the parser with its way of reporting, and small value types.

Owns the wording of usage errors. Invariant: wrong usage ends with status 2, one line on standard error that
names the cause, and the help to ask for. Used by `cli.main` and every command module.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn


class CommandError(Exception):
    """The command could not be done. The message names the cause and the next step; exit status 1."""


class UsageError(Exception):
    """The command line is wrong. Exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse with examples kept as they are written, no abbreviations, and one-line errors."""

    def __init__(
        self,
        prog: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        **more: object,
    ) -> None:
        # No abbreviated options: a script that relies on one breaks when a second option with that beginning appears.
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\ntry '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def subcommands(parser: argparse.ArgumentParser) -> "argparse._SubParsersAction[Parser]":
    """The place to add `create`, `list`, … to a command; one of them is required."""
    return parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)


def key_value(text: str) -> tuple[str, str]:
    """`key=value`, split at the first equals sign."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    return key.strip(), value


def whole_number(lowest: int, highest: int | None = None) -> "WholeNumber":
    """A type for argparse: an integer within bounds."""
    return WholeNumber(lowest, highest)


class WholeNumber:
    """Callable that argparse uses as a type; its message names the bounds."""

    def __init__(self, lowest: int, highest: int | None) -> None:
        self.lowest, self.highest = lowest, highest

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if number < self.lowest or (self.highest is not None and number > self.highest):
            bounds = f"from {self.lowest}" + (f" to {self.highest}" if self.highest is not None else " up")
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text}")
        return number


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when nothing is near."""
    from difflib import get_close_matches

    names: Sequence[str] = list(known)
    found = get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean '{found[0]}'?)" if found else ""
