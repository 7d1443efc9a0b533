"""The nodes of a YAML file, which know their lines, and the complaints about them.

Owns how a mistake is worded: file, line, and for a misspelt word the nearest right one. Invariant: asking for a value
never raises; what is wrong is written down, and the asker goes on, so that all mistakes are named at once. Called by
`jobfile`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

NEAR = 0.6


class FileError(Exception):
    """The file is wrong in one or more places; each complaint is a line of its own."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = complaints


def hint(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did you mean x?`, or what there is when nothing is near."""
    words = list(known)
    lower = {name.lower(): name for name in words}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=NEAR)
    if near:
        return f"did you mean {lower[near[0]]}?"
    return otherwise or (f"there are {', '.join(words)}" if words else "there are none")


def compose(path: Path) -> Any:
    """The root node of a file. Raises FileError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise FileError([f"{path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise FileError([f"{path}: it is not UTF-8 text"]) from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        raise FileError([f"{path}:{line}: no YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise FileError([f"{path}: no YAML: {error}"]) from None


@dataclass
class Nodes:
    """Reads nodes of one file and keeps what is wrong with them."""

    path: Path
    complaints: list[str] = field(default_factory=list)

    def complain(self, node: Any, what: str) -> None:
        self.complaints.append(f"{self.path}:{line_of(node)}: {what}")

    def by_line(self) -> list[str]:
        """The complaints in the order of the file."""
        start = len(f"{self.path}:")
        return sorted(self.complaints, key=lambda text: int(text[start:].partition(":")[0]))

    def entries(self, node: Any, what: str) -> list[tuple[str, Any]]:
        """A mapping's names and values; a name that is there twice is a mistake."""
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            self.complain(node, f"{what} is a mapping of names")
            return []
        found: dict[str, Any] = {}
        for key, value in node.value:
            if str(key.value) in found:
                self.complain(key, f"{what} has '{key.value}' twice")
            found[str(key.value)] = value
        return list(found.items())

    def items(self, node: Any, what: str) -> list[Any]:
        """A list's nodes."""
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.complain(node, f"{what} is a list")
            return []
        return list(node.value)

    def mapping(self, node: Any, words: tuple[str, ...], what: str) -> dict[str, Any]:
        """A mapping whose names are all known."""
        found = {}
        for name, value in self.entries(node, what):
            if name in words:
                found[name] = value
            else:
                self.complain(value, f"{what} has no '{name}': {hint(name, words)}")
        return found

    def text(self, node: Any) -> str | None:
        """A single value; an empty one is none."""
        if node is None or (isinstance(node, yaml.ScalarNode) and node.value == ""):
            return None
        if not isinstance(node, yaml.ScalarNode):
            self.complain(node, "expected a single value here")
            return None
        return str(node.value)

    def names(self, node: Any) -> tuple[str, ...]:
        """One value with commas, or a list of values."""
        if isinstance(node, yaml.SequenceNode):
            return tuple(text for item in node.value if (text := self.text(item)) is not None)
        return tuple(part.strip() for part in (self.text(node) or "").split(",") if part.strip())

    def texts(self, node: Any, what: str) -> dict[str, str]:
        return {name: self.text(value) or "" for name, value in self.entries(node, what)}

    def flag(self, node: Any) -> bool:
        return self.choice(node, ("true", "false"), "false") == "true"

    def choice(self, node: Any, words: tuple[str, ...], default: str) -> str:
        text = self.text(node)
        if text is None:
            return default
        if text.lower() in words:
            return text.lower()
        self.complain(node, f"'{text}' is none of {', '.join(words)}: {hint(text, words, 'choose one')}")
        return default


def line_of(node: Any) -> int:
    """The line of a node, counted from one; of a block of text, the line on which the text begins."""
    if node is None:
        return 1
    block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return int(node.start_mark.line) + (2 if block else 1)
