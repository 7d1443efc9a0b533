"""The systems under measurement: how each is started, stopped, killed, and which processes are its own.

A `System` is one broker on one data directory. `launch` returns at once, because one workload times the start; `start`
waits until a client can reach it. Headrace is this checkout; Kafka comes from a launcher script that is named by the
environment, because users do not have it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

START_S = 120.0
PORT_LOWEST = 17_000
PREPARES_MAX = 3
"""How often Kafka is set up anew: the id drawn for a cluster may begin with -, which its tools take for an option."""


class Unavailable(Exception):
    """The system cannot be run here; the message says why."""


def free_port() -> int:
    """A free port below the range that outgoing connections take theirs from."""
    for port in range(PORT_LOWEST + os.getpid() % 1000 * 10, 32_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free port")


class System(ABC):
    """One broker, on a directory of its own."""

    name: str
    brokers = 1
    replicas = 1
    acks = "1"
    keeps_topics = True
    workloads: "frozenset[str] | None" = None  # those it can serve; None for all

    def __init__(self, **settings: str) -> None:
        self.settings = {key.replace("_", "."): value for key, value in settings.items()}
        self.directory = Path(tempfile.mkdtemp(prefix=f"bench-{self.name.lower()}-"))
        self.port = free_port()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{self.port + at}" for at in range(self.brokers))

    @abstractmethod
    def prepare(self) -> None:
        """Whatever must be there before the first launch."""

    @abstractmethod
    def launch(self) -> None:
        """Begin to start, and return at once."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The broker's processes."""

    @abstractmethod
    def end(self, signal_number: int) -> None:
        """Send a signal to the broker and wait until it is gone."""

    def start(self) -> "System":
        self.prepare()
        self.launch()
        self.wait()
        return self

    def wait(self) -> None:
        """Return when a topic could be listed."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        deadline_s = time.monotonic() + START_S
        admin = AdminClient(
            {"bootstrap.servers": self.bootstrap, "reconnect.backoff.max.ms": 100, "log_level": 0}
        )
        while True:
            try:
                if len(admin.list_topics(timeout=1).brokers) >= self.brokers:
                    return
            except KafkaException:
                pass
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.name} did not start within {START_S:.0f} s; see {self.directory}")

    def stop(self) -> None:
        self.end(signal.SIGTERM)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def remove(self) -> None:
        """End it and delete its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def cpu_s(self) -> float:
        """Processor seconds used so far."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Resident memory."""
        kilobytes = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    kilobytes += int(line.split()[1])
        return kilobytes / 1024


class Headrace(System):
    """This checkout, as `headrace serve`."""

    name = "Headrace"
    process: "subprocess.Popen[bytes] | None" = None

    def prepare(self) -> None:
        pass

    def arguments(self) -> list[str]:
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(self.directory / "data")]
        command += ["--port", str(self.port)]
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        return command

    def launch(self) -> None:
        command = self.arguments()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def pids(self) -> list[int]:
        return [self.process.pid] if self.process else []

    def end(self, signal_number: int) -> None:
        if self.process:
            self.process.send_signal(signal_number)
            self.process.wait(START_S)
            self.process = None


class Kafka(System):
    """Real Kafka, through the launcher `kafka` in the directory that HEADRACE_PEERS names.

    The launcher takes `up --port P --set key=value`, `start 1`, `stop 1`, `kill 1`, `down`, `pids` (JSON) and
    `tool NAME ARGUMENTS`, and keeps its cluster in $PEERS_RUN.
    """

    name = "Kafka"

    def __init__(self, **settings: str) -> None:
        super().__init__(**settings)
        self.environment = {**os.environ, "PEERS_RUN": str(self.directory / "run")}

    @staticmethod
    def launcher() -> Path | None:
        folder = os.environ.get("HEADRACE_PEERS")
        path = Path(folder) / "kafka" if folder else None
        return path if path and path.is_file() and shutil.which("java") else None

    def call(self, *arguments: str) -> str:
        launcher = self.launcher()
        if launcher is None:
            raise Unavailable(
                "HEADRACE_PEERS names no directory with a Kafka launcher, or java is not installed"
            )
        return subprocess.run(
            [str(launcher), *arguments], env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def prepare(self) -> None:
        more = [word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")]
        for tries in range(PREPARES_MAX):
            try:
                self.call("up", "--brokers", str(self.brokers), "--port", str(self.port), *more)
                return
            except subprocess.CalledProcessError as error:
                self.call("down")
                if tries == PREPARES_MAX - 1:
                    raise Unavailable(f"{self.name} did not start; see {self.directory}") from error

    def start(self) -> "System":
        self.prepare()  # the launcher's `up` also starts it
        self.wait()
        return self

    def launch(self) -> None:
        self.call("start", "1")

    def pids(self) -> list[int]:
        return [pid for pid in json.loads(self.call("pids")).values() if pid]

    def end(self, signal_number: int) -> None:
        self.call("kill" if signal_number == signal.SIGKILL else "stop", "1")

    def remove(self) -> None:
        self.call("down")
        shutil.rmtree(self.directory, ignore_errors=True)


def kafka_tool(*arguments: str) -> str:
    """The output of one of Kafka's own tools, through the same launcher."""
    launcher = Kafka.launcher()
    if launcher is None:
        raise Unavailable("Kafka's tools: HEADRACE_PEERS is not set, or java is not installed")
    return subprocess.run(
        [str(launcher), "tool", *arguments], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
