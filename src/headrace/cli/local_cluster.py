"""A cluster on this machine: what is written down about it, and its processes.

Owns the layout of the directory that `headrace up` is given and everything in it that is not a broker's own:

    cluster.json      host, first port, number of brokers and of those that vote, settings given to all of them
    broker-N/         data of broker N, which the broker locks while it runs
    broker-N.log      what broker N wrote to standard error
    broker-N.pid      the process that was started for it; gone after a clean stop
    broker-N.out      what that process wrote to standard output: one line when it is in service
    .cluster.lock     held by the command that starts or ends processes

Invariants. A process is only ever signalled when it is the one that was started: a pid counts together with the time
the kernel says it began and the boot it belongs to, so a recycled pid is never mistaken for a broker. A pid file that
is left over means that a broker ended without being asked to. Called by `up`, `down`, `status` and `broker`.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.cli.parser import CommandError

DEFAULT_DIRECTORY = ".headrace"
HOST = "127.0.0.1"
CONTROLLERS_MAX = 3
BROKERS_MAX = 100
LOCK_WAIT_S = 60.0
STOP_WAIT_S = 60.0
KILL_WAIT_S = 10.0
LOOK_EVERY_S = 0.01
LOG_TAIL_BYTES = 4096
PORT_HIGHEST = 65_535

STATE_FILE = "cluster.json"
SINGLE_BROKER_FILE = "meta.properties"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be mistaken for another that gets its number later."""

    pid: int
    began: str

    def alive(self) -> bool:
        """Whether it still runs; one that only waits to be collected by its parent does not."""
        return _began(self.pid) == self.began

    def send(self, number: signal.Signals) -> bool:
        """Signal it; whether it was there."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def _began(pid: int) -> str | None:
    """The boot and the tick in which a process began; None when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{_boot_id()}/{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """The process that has this pid now."""
    began = _began(pid)
    return None if began is None else Process(pid, began)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `headrace up` was asked for, as it is kept for the commands that come later."""

    brokers: int
    port: int
    host: str = HOST
    settings: dict[str, str] = field(default_factory=dict)
    log_level: str = "warning"
    controllers: int = 0
    """The first so many brokers are told to be the voters. It stays when brokers are added, until those have been made
    voters: a broker that voted alone would not start with others named. 0 is as many as a new cluster has."""

    def __post_init__(self) -> None:
        if not self.controllers:  # a new cluster, or a file of before this was written down
            object.__setattr__(self, "controllers", self.controllers_wanted)

    @property
    def ids(self) -> range:
        return range(1, self.brokers + 1)

    @property
    def controllers_wanted(self) -> int:
        """How many brokers vote in a cluster of this size."""
        return min(self.brokers, CONTROLLERS_MAX)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"{self.host}:{self.port_of(number)}" for number in self.ids)

    @property
    def voters(self) -> str:
        return ",".join(
            f"{number}@{self.host}:{self.port_of(number)}" for number in self.ids[: self.controllers]
        )

    def port_of(self, number: int) -> int:
        return self.port + number - 1


class LocalCluster:
    """The cluster whose state is in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: dict[int, subprocess.Popen[bytes]] = {}

    # -- what is written down ---------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What was asked for; CommandError when there is no cluster in this directory."""
        found = self.plan_if_any()
        if found is None:
            raise CommandError(
                f"there is no cluster in {self.directory}\n"
                "  start one with 'headrace up', or name its directory with --data"
            )
        return found

    def plan_if_any(self) -> Plan | None:
        try:
            text = (self.directory / STATE_FILE).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return Plan(**json.loads(text))
        except (ValueError, TypeError):
            raise CommandError(
                f"{self.directory / STATE_FILE} is damaged\n"
                "  move it away and run 'headrace up' with the options it had"
            ) from None

    def keep(self, plan: Plan) -> None:
        """Write the plan down, whole or not at all."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_whole(self.directory / STATE_FILE, json.dumps(asdict(plan), indent=2) + "\n")
        except OSError as error:
            raise CommandError(
                f"cannot write to {self.directory}: {(error.strerror or '').lower()}\n  choose another with --data"
            ) from None

    def refuse_single_broker(self) -> None:
        """A directory that `headrace serve` wrote is no cluster's."""
        if (self.directory / SINGLE_BROKER_FILE).exists():
            raise CommandError(
                f"{self.directory} holds the data of a single broker of 'headrace serve'\n"
                "  choose another directory for the cluster with --data"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one command at a time starts or ends processes of this cluster."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".cluster.lock").open("w") as file:
            deadline_s = time.monotonic() + LOCK_WAIT_S
            while not _try_lock(file):
                if time.monotonic() > deadline_s:
                    raise CommandError(
                        f"another headrace command works on {self.directory}\n  try again when it is done"
                    )
                time.sleep(LOOK_EVERY_S)
            yield

    # -- processes --------------------------------------------------------------------------------------------------

    def data_dir(self, number: int) -> Path:
        return self.directory / f"broker-{number}"

    def log_file(self, number: int) -> Path:
        return self.directory / f"broker-{number}.log"

    def _pid_file(self, number: int) -> Path:
        return self.directory / f"broker-{number}.pid"

    def _out_file(self, number: int) -> Path:
        return self.directory / f"broker-{number}.out"

    def said_ready(self, number: int) -> bool:
        """Whether the broker's process, as last started, has said that it is in service."""
        try:
            return self._out_file(number).read_bytes().startswith(b"ready ")
        except FileNotFoundError:
            return False

    def process(self, number: int) -> Process | None:
        """The live process of a broker."""
        found = self._last_process(number)
        return found if found is not None and found.alive() else None

    def processes(self, plan: Plan) -> dict[int, Process]:
        """The live processes by broker."""
        return {number: found for number in plan.ids if (found := self.process(number)) is not None}

    def ended_by_itself(self, number: int) -> bool:
        """Whether the broker's process is gone without having been stopped."""
        last = self._last_process(number)
        return last is not None and not last.alive()

    def _last_process(self, number: int) -> Process | None:
        try:
            return Process(**json.loads(self._pid_file(number).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def start(self, plan: Plan, number: int, *, lifeline: bool = False) -> None:
        """Start one broker's process and return at once. With a lifeline it ends when this process does."""
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(self.data_dir(number))]
        command += ["--host", plan.host, "--port", str(plan.port_of(number)), "--log-level", plan.log_level]
        for key, value in {**plan.settings, **self._own_settings(plan, number)}.items():
            command += ["--set", f"{key}={value}"]
        self.collect()
        with self.log_file(number).open("ab") as log, self._out_file(number).open("wb") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, **({"HEADRACE_STOP_ON_STDIN_EOF": "1"} if lifeline else {})},
                start_new_session=True,  # Ctrl-C in the terminal reaches the command, which then stops the brokers
            )
        self.children[number] = child
        process = identify(child.pid)
        if process is not None:
            _write_whole(self._pid_file(number), json.dumps(asdict(process)) + "\n")

    def _own_settings(self, plan: Plan, number: int) -> dict[str, str]:
        return {"node.id": str(number), "controller.quorum.voters": plan.voters}

    def stop(self, numbers: list[int], wait_s: float = STOP_WAIT_S) -> list[int]:
        """Stop brokers cleanly, all at once; those that had to be killed because they did not end in time."""
        stopping = {number: process for number in numbers if (process := self.process(number)) is not None}
        for process in stopping.values():
            process.send(signal.SIGTERM)
            process.send(signal.SIGCONT)  # a paused process would never see the other signal
        stubborn = self._await_end(stopping, wait_s)
        for number in stubborn:
            stopping[number].send(signal.SIGKILL)
        self._await_end(stopping, KILL_WAIT_S)
        for number in stopping:
            self._pid_file(number).unlink(missing_ok=True)
        return stubborn

    def kill(self, number: int) -> None:
        """End one broker at once. Its pid file stays: that is how `status` knows that it died."""
        process = self.process(number)
        if process is not None:
            process.send(signal.SIGKILL)
            self._await_end({number: process}, KILL_WAIT_S)

    def forget(self, number: int) -> None:
        """Take a broker that died for stopped."""
        self._pid_file(number).unlink(missing_ok=True)

    def _await_end(self, processes: dict[int, Process], wait_s: float) -> list[int]:
        deadline_s = time.monotonic() + wait_s
        while True:
            self.collect()
            left = [number for number, process in processes.items() if process.alive()]
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(LOOK_EVERY_S)

    def collect(self) -> None:
        """Take note of own children that ended, so that none is left as a zombie."""
        for number, child in list(self.children.items()):
            if child.poll() is not None:
                if child.stdin is not None:
                    child.stdin.close()
                del self.children[number]

    def last_words(self, number: int) -> str:
        """The end of a broker's log."""
        try:
            with self.log_file(number).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def directory_of(option: str | None) -> Path:
    """The cluster's directory: `--data`, else $HEADRACE_DATA, else `.headrace` here."""
    return Path(option or os.environ.get("HEADRACE_DATA") or DEFAULT_DIRECTORY)


def add_data_option(parser: Any) -> None:
    """Declare `--data`."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help=f"the cluster's directory (default: $HEADRACE_DATA, else {DEFAULT_DIRECTORY})",
    )


def port_taken(host: str, port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise CommandError(
                f"cannot listen on {host}:{port}: {(error.strerror or '').lower()}\n  choose another with --port"
            ) from None
    return False


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(text)
    beside.replace(path)
