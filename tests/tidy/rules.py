"""The rules that the source tree is held to, each a function from one source file to the complaints about it.

A rule reads only the text and the path it is given, so that a planted file can show that it bites. `RULES` are for the
package, `TEST_RULES` for the tests, `TEXT_RULES` for every tracked file; `test_tree.py` applies them to the whole tree.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property

PACKAGE = "headrace"
# Lowest first: a layer may import the layers before it.
LAYERS = (
    "base",
    "wire",
    "records",
    "storage",
    "consensus",
    "cluster",
    "replication",
    "coordinators",
    "security",
    "server",
    "client",
    "gateway",
    "pipeline",
    "console",
    "cli",
)
# Layers that may import less than all that lies below them: whatever runs outside a broker reaches it by the protocol.
NARROWER = {
    "client": {"base", "wire", "records"},
    "gateway": {"base", "wire", "records", "client"},
    "pipeline": {"base", "wire", "records", "client"},
    "console": {"base", "wire", "records", "client", "gateway"},
    "testing": {"base", "wire", "records", "client"},
}
# Modules of the standard library that touch the world: time, chance, sockets, threads, processes, event loops.
WORLDLY = {
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "uuid",
    "uvloop",
}
WORLDLY_CALLS = {"os.urandom", "os.getrandom", "os.fork", "os.system"}
# Where the world is met. Everything else is handed a time, an identifier or bytes.
EDGES = (
    "base/clock.py",
    "storage/files.py",
    "storage/flusher.py",
    "storage/log_checkpoints.py",
    "server/broker*.py",
    "server/listener*.py",
    "server/main.py",
    "server/metadata.py",
    "server/peer*.py",
    "server/controller.py",
    "server/forwarding.py",
    "server/quorum.py",
    "server/registration.py",
    "server/producer_ids.py",
    "client/*.py",
    "pipeline/*.py",
    "cli/*.py",
    "testing/*.py",
)
THIRD_PARTY = {"cramjam", "crc32c", "cython", "msgspec"}
THIRD_PARTY_OF_LAYER = {
    "cli": {"rich", "uvloop"},
    "client": {"fastavro", "opentelemetry", "pyarrow", "uvloop"},
    "pipeline": {"fastavro", "google", "pyarrow", "pyspark", "yaml"},
    "server": {"uvloop"},
    "testing": {"pytest"},
}
PRINTING = {"server/main.py"}
LINES_MAX = 550
DOCSTRING_CHARACTERS_MIN = 20
TEST_NAME_WORDS_MIN = 3
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "stuff"}


@dataclass(frozen=True)
class Source:
    """One Python file: its path inside the package or the tests, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def layer(self) -> str:
        """The folder it lies in; empty for the package's own root."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full dotted name of everything imported, wherever in the file it stands."""
        found: list[tuple[int, str]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        return found


Rule = Callable[[Source], Iterator[str]]


def allowed_layers(layer: str) -> set[str]:
    """The layers that this one may import; the package's root has the names of the client and the command line."""
    if not layer:
        return {"base", "records", "client", "cli"}
    below = NARROWER.get(layer)
    if below is None:
        below = set(LAYERS[: LAYERS.index(layer)]) if layer in LAYERS else set()
    return below | {layer}


def imports_go_downward(source: Source) -> Iterator[str]:
    """A layer imports only the layers below it."""
    allowed = allowed_layers(source.layer)
    for line, name in source.imports:
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1 and parts[1] != "__version__" and parts[1] not in allowed:
            yield f"{source.path}:{line}: {source.layer or 'the root'} may not import {parts[1]}"


def layer_is_known(source: Source) -> Iterator[str]:
    """A new folder gets its place in the order of layers before it gets code."""
    if source.layer and source.layer not in LAYERS and source.layer not in NARROWER:
        yield f"{source.path}:1: {source.layer} is no layer"


def world_is_met_at_the_edges(source: Source) -> Iterator[str]:
    """No clock, chance, socket, thread or event loop but in the modules made for that."""
    if any(fnmatch(source.path, edge) for edge in EDGES):
        return
    for line, name in source.imports:
        if name.split(".")[0] in WORLDLY:
            yield f"{source.path}:{line}: imports {name} outside the edges"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WORLDLY_CALLS:
            yield f"{source.path}:{node.lineno}: uses {ast.unparse(node)} outside the edges"


def dependencies_are_declared(source: Source) -> Iterator[str]:
    """Third-party packages are those that the broker's installation brings, each where it belongs."""
    allowed = THIRD_PARTY | THIRD_PARTY_OF_LAYER.get(source.layer, set())
    for line, name in source.imports:
        top = name.split(".")[0]
        if top != PACKAGE and top not in sys.stdlib_module_names and top not in allowed:
            yield f"{source.path}:{line}: {source.layer or 'the root'} may not import {top}"


def module_is_short(source: Source) -> Iterator[str]:
    """A long module is two things under one name."""
    lines = source.text.count("\n")
    if lines > LINES_MAX:
        yield f"{source.path}:1: {lines} lines, at most {LINES_MAX}"


def module_says_what_it_owns(source: Source) -> Iterator[str]:
    """Every module opens with a docstring."""
    said = ast.get_docstring(source.tree) or ""
    if len(said) < DOCSTRING_CHARACTERS_MIN:
        yield f"{source.path}:1: no docstring that says what this module owns"


def module_has_a_name(source: Source) -> Iterator[str]:
    """A module is named for what it is."""
    for part in source.path.removesuffix(".py").split("/"):
        if part in EMPTY_NAMES:
            yield f"{source.path}:1: {part} says nothing about what is in it"


def only_the_command_line_prints(source: Source) -> Iterator[str]:
    """Standard output is the command line's, and the broker's own when it says that it is ready; the rest logs."""
    if source.layer == "cli" or source.path in PRINTING:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.path}:{node.lineno}: prints"


def name_is_a_statement(source: Source) -> Iterator[str]:
    """A test is named after what it shows."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            words = [w for w in node.name.removeprefix("test_").split("_") if w]
            if len(words) < TEST_NAME_WORDS_MIN:
                yield f"{source.path}:{node.lineno}: {node.name} is no statement"


def waits_without_sleeping(source: Source) -> Iterator[str]:
    """A test waits for a condition with a deadline. Yielding to the loop (`sleep(0)`) is no wait."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        yields = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        if name.split(".")[-1] == "sleep" and not yields:
            yield f"{source.path}:{node.lineno}: sleeps; wait for a condition with a deadline"


# Words that must not be in the repository: places of one machine, and notes about how the work was organised. The
# brackets keep a pattern from finding itself.
FORBIDDEN = {
    r"(^|[^a-z.])/(wor[k]|roo[t])/": "a path of one machine",
    r"\b[iI]ssues? [#]?\d+\b": "the number of an issue",
    r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b": "work left undone",
}


def text_is_clean(path: str, text: str) -> Iterator[str]:
    """No tracked file holds a forbidden word."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in FORBIDDEN.items():
            if re.search(pattern, line):
                yield f"{path}:{number}: {what}: {line.strip()[:80]}"


def pins_hold_no_address(path: str, text: str) -> Iterator[str]:
    """A pin is a version and hashes; where to fetch it from is the machine's own business."""
    if not path.startswith("requirements/"):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\w+://|--(extra-)?index-url|--find-links| @ ", line):
            yield f"{path}:{number}: an address: {line.strip()[:80]}"
        elif re.match(r"[a-z0-9]", line) and not re.match(r"[a-z0-9._-]+==\S+( ; .+)? \\$", line):
            yield f"{path}:{number}: not pinned to one version with hashes: {line.strip()[:80]}"


RULES: tuple[Rule, ...] = (
    layer_is_known,
    imports_go_downward,
    world_is_met_at_the_edges,
    dependencies_are_declared,
    module_is_short,
    module_says_what_it_owns,
    module_has_a_name,
    only_the_command_line_prints,
)
TEST_RULES: tuple[Rule, ...] = (
    name_is_a_statement,
    waits_without_sleeping,
    module_says_what_it_owns,
    module_is_short,
)
TEXT_RULES = (text_is_clean, pins_hold_no_address)
