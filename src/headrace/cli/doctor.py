"""`headrace doctor`: what this machine offers and lacks.

Owns the checks. Invariant: each answers `ok`, `warn` (works, but slower or not all of it) or `bad` (a broker
would not run), with what to do about it; none of them changes the machine. The exit status is 1 only when
something is bad.
"""

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from headrace.cli.output import print_json, print_table

DESCRIPTION = """\
Check what this machine offers and lacks for Headrace: Python, the compiled codec, the event loop, fsync latency of
the data directory, free space, file limits, free ports, and Java for Spark. Ends with status 1 when a broker could
not run."""

EXAMPLE = """\
example:
  headrace doctor
  headrace doctor --data /var/lib/headrace --json"""

PYTHON_MIN = (3, 11)
OPEN_FILES_WANTED = 4096
FREE_BYTES_WANTED = 1024**3
FSYNC_SAMPLES = 20
FSYNC_SLOW_MS = 10.0
BROKER_PORTS = range(9092, 9097)
GATEWAY_PORTS = (8080, 9090)
JAVA_MIN = 17

OK, WARN, BAD = "ok", "warn", "bad"
COLOURS = {OK: "green", WARN: "yellow", BAD: "bold red"}


class Finding(NamedTuple):
    """What one check found."""

    check: str
    status: str
    found: str
    advice: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--data", metavar="DIR", help="data directory to look at (default: $HEADRACE_DATA, else .headrace)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks and print what they found."""
    data_dir = options.data or os.environ.get("HEADRACE_DATA") or ".headrace"
    findings = list(findings_for(data_dir))
    if options.json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("check", "status", "found", "what to do"), findings, colours=COLOURS)
    return 1 if any(finding.status == BAD for finding in findings) else 0


def findings_for(data_dir: str) -> Iterator[Finding]:
    """All checks, for a broker with this data directory."""
    yield _python()
    yield _codec()
    yield _uvloop()
    yield from _directory(data_dir)
    yield _open_files()
    yield _ports("broker ports", BROKER_PORTS, "brokers; or give --port")
    yield _ports("gateway ports", GATEWAY_PORTS, "REST (8080) and gRPC (9090); or choose others")
    yield _java()


def _python() -> Finding:
    version = platform.python_version()
    wanted = ".".join(map(str, PYTHON_MIN))
    if sys.version_info < PYTHON_MIN:
        return Finding("python", BAD, version, f"install Python {wanted} or newer")
    return Finding("python", OK, f"{version} ({platform.python_implementation()})", "")


def _codec() -> Finding:
    from headrace.records import codec

    if codec.COMPILED:
        return Finding("record codec", OK, "compiled", "")
    if os.environ.get("HEADRACE_PURE") == "1":
        return Finding("record codec", WARN, "interpreted, because HEADRACE_PURE=1", "unset HEADRACE_PURE")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    advice = (
        "install Headrace again, to compile it" if compiler else "install a C compiler, then Headrace again"
    )
    return Finding("record codec", WARN, "interpreted (works, slower for single records)", advice)


def _uvloop() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("uvloop")
    except PackageNotFoundError:
        return Finding("event loop", WARN, "asyncio (works, slower)", "pip install uvloop")
    return Finding("event loop", OK, f"uvloop {found}", "")


def _directory(data_dir: str) -> Iterator[Finding]:
    """The data directory, or the nearest one above it that exists, since `serve` would create the rest."""
    place = os.path.abspath(data_dir)
    while not os.path.isdir(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    try:
        latency_ms = _fsync_ms(place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield Finding(
            "data directory", BAD, f"cannot write in {place}: {reason}", "choose another with --data"
        )
        return
    yield Finding(
        "data directory",
        OK,
        f"{data_dir} (in {place})" if place != os.path.abspath(data_dir) else data_dir,
        "",
    )
    slow = latency_ms > FSYNC_SLOW_MS
    advice = (
        "records flushed before they are acknowledged will wait this long: use a faster disk for them"
        if slow
        else ""
    )
    yield Finding(
        "fsync latency", WARN if slow else OK, f"{latency_ms:.2f} ms (median of {FSYNC_SAMPLES})", advice
    )
    free = shutil.disk_usage(place).free
    low = free < FREE_BYTES_WANTED
    yield Finding(
        "free space",
        WARN if low else OK,
        f"{free / 1024**3:.1f} GiB",
        "make room, or lower retention" if low else "",
    )


def _fsync_ms(place: str) -> float:
    """The median time of writing 4 KiB and syncing it."""
    times_ms = []
    with tempfile.NamedTemporaryFile(dir=place, prefix=".headrace-doctor-") as file:
        for _ in range(FSYNC_SAMPLES):
            os.write(file.fileno(), bytes(4096))
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            times_ms.append((time.perf_counter() - begin) * 1000)
    return sorted(times_ms)[FSYNC_SAMPLES // 2]


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    found = (
        f"{'unlimited' if soft == unlimited else soft} (hard {'unlimited' if hard == unlimited else hard})"
    )
    if soft != unlimited and soft < OPEN_FILES_WANTED:
        return Finding(
            "open files", WARN, found, f"raise it before many clients connect: ulimit -n {OPEN_FILES_WANTED}"
        )
    return Finding("open files", OK, found, "")


def _ports(check: str, ports: "range | tuple[int, ...]", use: str) -> Finding:
    taken = [port for port in ports if not _free(port)]
    if not taken:
        return Finding(check, OK, f"{_span(ports)} free", "")
    return Finding(check, WARN, f"in use: {', '.join(map(str, taken))}", f"free them for {use}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _span(ports: "range | tuple[int, ...]") -> str:
    return f"{ports[0]}-{ports[-1]}" if isinstance(ports, range) else ", ".join(map(str, ports))


def _java() -> Finding:
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    advice = f"only Spark pipelines need it: install Java {JAVA_MIN} or newer"
    if not program or not os.path.exists(program):
        return Finding("java", WARN, "not found", advice)
    try:
        answer = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding("java", WARN, f"{program} does not run", advice)
    line = (answer.stderr or answer.stdout).strip().partition("\n")[0]
    major = _java_major(line)
    if major is None or major < JAVA_MIN:
        return Finding("java", WARN, line or "unknown version", advice)
    return Finding("java", OK, line, "")


def _java_major(line: str) -> int | None:
    """17 from `openjdk version "17.0.15" …`, 8 from `java version "1.8.0_402"`."""
    parts = line.partition('"')[2].partition('"')[0].split(".")
    if parts[0] == "1" and len(parts) > 1:
        parts = parts[1:]
    digits = "".join(c for c in parts[0] if c.isdigit())
    return int(digits) if digits else None
