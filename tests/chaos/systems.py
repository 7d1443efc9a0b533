"""The clusters that chaos is made in: Headrace through `headrace.testing`, or real Kafka through a launcher.

A `System` does to a broker what a step of the schedule asks. Kafka is there to check the checker: what it reports on
Kafka is most likely the checker's own mistake. Called by the chaos run.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Protocol

from headrace.testing import Cluster
from headrace.testing.ports import free_row
from tests.chaos.schedule import Fault

DISK_MB = 512
SETTINGS = {
    "default.replication.factor": 3,
    "min.insync.replicas": 2,
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": 3,
}


class System(Protocol):
    """A cluster that can be mistreated."""

    faults: list[Fault]

    @property
    def bootstrap(self) -> str: ...
    @property
    def ids(self) -> list[int]: ...
    def start_all(self) -> None: ...
    def start(self, number: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def stop(self, number: int) -> None: ...
    def pause(self, number: int) -> None: ...
    def resume(self, number: int) -> None: ...
    def cut(self, side: list[int], *, clients: bool, one_way: bool) -> None: ...
    def heal(self) -> None: ...
    def fill_disk(self, number: int) -> None: ...
    def empty_disk(self, number: int) -> None: ...
    def close(self) -> None: ...


class HeadraceSystem:
    """Five brokers of this checkout, behind cables, each on a small disk of its own where root can mount one."""

    def __init__(
        self, brokers: int, *, disks: bool = True, settings: dict[str, object] | None = None
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
        self.disks: list[Path] = []
        self.why_no_disks = self._mount(brokers) if disks else "not wanted"
        self.cluster = Cluster(
            brokers, settings={**SETTINGS, **(settings or {})}, data_dir=self.directory, cables=True
        )
        self.faults = [fault for fault in Fault if fault is not Fault.FULL_DISK or not self.why_no_disks]

    def _mount(self, brokers: int) -> str:
        """Give each broker a file system of its own; why that cannot be, or nothing."""
        if os.geteuid() != 0:
            return "only root may mount a file system"
        for number in range(1, brokers + 1):
            place = self.directory / f"broker-{number}"
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "headrace-chaos", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return done.stderr.strip()
            self.disks.append(place)
        return ""

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap

    @property
    def ids(self) -> list[int]:
        return self.cluster.ids

    def start_all(self) -> None:
        self.cluster.start()

    def start(self, number: int) -> None:
        self.cluster.broker(number).start()

    def kill(self, number: int) -> None:
        self.cluster.broker(number).kill()

    def stop(self, number: int) -> None:
        if self.cluster.broker(number).running:
            self.cluster.broker(number).stop(60)

    def pause(self, number: int) -> None:
        if self.cluster.broker(number).running:
            self.cluster.broker(number).pause()

    def resume(self, number: int) -> None:
        if self.cluster.broker(number).running:
            self.cluster.broker(number).resume()

    def cut(self, side: list[int], *, clients: bool, one_way: bool) -> None:
        if one_way:
            for number in side:
                for other in self.ids:
                    if other != number:
                        self.cluster.cut(number, other)
        else:
            self.cluster.split(side, clients=clients)

    def heal(self) -> None:
        self.cluster.heal()

    def fill_disk(self, number: int) -> None:
        place = self.directory / f"broker-{number}"
        free = os.statvfs(place)
        with (place / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, max(1, free.f_bavail) * free.f_frsize)

    def empty_disk(self, number: int) -> None:
        (self.directory / f"broker-{number}" / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        try:
            self.cluster.kill_all()
            self.cluster.close()
        finally:
            for place in self.disks:
                subprocess.run(["umount", "--lazy", str(place)], check=False)
            shutil.rmtree(self.directory, ignore_errors=True)


class KafkaSystem:
    """Real Kafka, through the launcher `kafka` in the directory that HEADRACE_PEERS names."""

    def __init__(self, brokers: int) -> None:
        self.launcher = Path(os.environ["HEADRACE_PEERS"]) / "kafka"
        self.directory = Path(tempfile.mkdtemp(prefix="kafka-chaos-"))
        self.environment = {**os.environ, "PEERS_RUN": str(self.directory / "run")}
        self.port, self._brokers = free_row(brokers * 2), brokers
        self.faults = [Fault.KILL, Fault.STOP, Fault.PAUSE]

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{self.port + at}" for at in range(self._brokers))

    @property
    def ids(self) -> list[int]:
        return list(range(1, self._brokers + 1))

    def _call(self, *arguments: str) -> str:
        return subprocess.run(
            [str(self.launcher), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def start_all(self) -> None:
        settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        self._call("up", "--brokers", str(self._brokers), "--port", str(self.port), *settings)

    def start(self, number: int) -> None:
        self._call("start", str(number))

    def kill(self, number: int) -> None:
        self._call("kill", str(number))

    def stop(self, number: int) -> None:
        self._call("stop", str(number))

    def _signal(self, number: int, which: signal.Signals) -> None:
        pid = json.loads(self._call("pids")).get(str(number))
        if pid:
            os.kill(pid, which)

    def pause(self, number: int) -> None:
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def cut(self, side: list[int], *, clients: bool, one_way: bool) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        pass

    def fill_disk(self, number: int) -> None:
        raise NotImplementedError

    def empty_disk(self, number: int) -> None:
        pass

    def close(self) -> None:
        self._call("down")
        shutil.rmtree(self.directory, ignore_errors=True)
