"""What a cluster looks like now: the cluster's own answers put together with what this machine knows of its processes.

Owns the JSON of `headrace status` and the tables for people. Invariant: a broker that cannot be asked is still listed,
with what is known of it; asking is bounded by short timeouts, because a paused broker accepts connections and never
answers. Called by `status` and by the live view of `up`.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.base.errors import KafkaError
from headrace.cli.local_cluster import LocalCluster, Plan
from headrace.client.admin import Admin
from headrace.client.cluster import NO_NODE, TopicInfo
from headrace.client.cluster_admin import ClusterInfo, QuorumInfo, describe_brokers, describe_quorum
from headrace.cluster.control_messages import BrokerLoad, LoadsReply, Malformed, decode
from headrace.wire.apis import PRIVATE_LOADS

ASK_TIMEOUT_MS = 3_000
CONNECT_TIMEOUT_MS = 1_000
LOAD_WINDOW_S = 0.2
FILES_COUNTED_MAX = 200_000

RUNNING, FENCED, STOPPED, DEAD = "running", "fenced", "stopped", "dead"
COLOURS = {RUNNING: "green", FENCED: "yellow", STOPPED: "dim", DEAD: "bold red", "leader": "bold"}
NO_CONTROLLER = (
    "no active controller: this is what was known last, and nothing can change until most of the voters run"
)


@dataclass(slots=True)
class Load:
    """What a broker has to do."""

    cpu_percent: float
    memory_bytes: int
    disk_bytes: int
    reported: BrokerLoad | None = None
    """What the broker told the controller, rates among it; None when that is not known."""

    def as_json(self) -> dict[str, Any]:
        told = self.reported
        return {
            "cpu_percent": round(self.cpu_percent, 1),
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "bytes_in_per_s": None if told is None else round(told.bytes_in),
            "bytes_out_per_s": None if told is None else round(told.bytes_out),
            "messages_in_per_s": None if told is None else round(told.messages_in, 1),
        }


@dataclass(slots=True)
class BrokerRow:
    """One broker."""

    number: int
    host: str
    port: int
    state: str
    controller: str = "none"
    pid: int | None = None
    leaders: int = 0
    replicas: int = 0
    load: Load | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.number,
            "pid": self.pid,
            "host": self.host,
            "port": self.port,
            "state": self.state,
            "controller": self.controller,
            "leaders": self.leaders,
            "replicas": self.replicas,
            "load": None if self.load is None else self.load.as_json(),
        }


@dataclass(slots=True)
class View:
    """The whole cluster at one moment."""

    bootstrap: str
    controller: int | None = None
    brokers: list[BrokerRow] = field(default_factory=list)
    total: int = 0
    offline: int = 0
    under_replicated: int = 0
    answered: bool = False
    why_not: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "bootstrap": self.bootstrap,
            "controller": self.controller,
            "brokers": [row.as_json() for row in self.brokers],
            "partitions": {
                "total": self.total,
                "offline": self.offline,
                "under_replicated": self.under_replicated,
            },
        }


@dataclass(frozen=True, slots=True)
class Answers:
    """What the cluster said."""

    cluster: ClusterInfo
    quorum: QuorumInfo | None
    controller: int | None
    """The active controller; None while there is none."""
    topics: Sequence[TopicInfo]
    loads: Mapping[int, BrokerLoad]
    """What brokers told the controller; nothing of a cluster that is not Headrace."""


async def ask(config: dict[str, object]) -> Answers:
    """Ask whoever answers there. Raises KafkaError."""
    patient = {
        "socket.connection.setup.timeout.ms": CONNECT_TIMEOUT_MS,
        "request.timeout.ms": ASK_TIMEOUT_MS,
        "default.api.timeout.ms": ASK_TIMEOUT_MS,
    }
    async with Admin({**patient, **config}) as admin:
        cluster = await describe_brokers(admin)
        quorum, controller = None, None
        try:
            quorum = await describe_quorum(admin)
            controller = quorum.leader_id
        except KafkaError as error:
            # Who cannot tell now has no leader of the quorum to ask: whom a broker then names as the controller is only
            # someone to send requests to, itself perhaps. A cluster that never tells of its quorum means it.
            if not error.retriable and cluster.controller_id != NO_NODE:
                controller = cluster.controller_id
        reply = await admin.cluster.describe(None)
        topics = [admin.cluster.topics[topic.name] for topic in reply.topics]
        return Answers(cluster, quorum, controller, topics, await _ask_loads(admin, quorum))


async def _ask_loads(admin: Admin, quorum: QuorumInfo | None) -> Mapping[int, BrokerLoad]:
    """What the active controller has heard of loads. Asked last: a broker that does not know this hangs up."""
    if quorum is None or quorum.leader_id not in admin.cluster.nodes:
        return {}
    try:
        connection = await admin.cluster.connection(quorum.leader_id)
        return decode(LoadsReply, await connection.request_private(PRIVATE_LOADS)).loads
    except (KafkaError, Malformed):
        return {}


async def _ask_any(addresses: Sequence[str]) -> Answers | str:
    """The answers of the first broker that gives any, or why none did."""
    why = "no broker runs"
    for address in addresses:
        try:
            return await ask({"bootstrap.servers": address})
        except KafkaError as error:
            why = error.message
    return why


async def local_view(local: LocalCluster, plan: Plan, meter: "Meter") -> View:
    """The cluster of a directory, with its processes."""
    begun_s = time.monotonic()
    processes = local.processes(plan)
    meter.look({number: process.pid for number, process in processes.items()})
    awake = [number for number, process in processes.items() if not paused(process.pid)]
    answers = await _ask_any([f"{plan.host}:{plan.port_of(number)}" for number in awake])
    if meter.fresh:
        await asyncio.sleep(max(0.0, LOAD_WINDOW_S - (time.monotonic() - begun_s)))
        meter.look({number: process.pid for number, process in processes.items()})
    view = View(plan.bootstrap)
    for number in plan.ids:
        process = processes.get(number)
        row = BrokerRow(number, plan.host, plan.port_of(number), STOPPED)
        if process is not None:
            row.pid, row.state = process.pid, FENCED
            row.load = meter.load(number, local.data_dir(number))
        elif local.ended_by_itself(number):
            row.state = DEAD
        view.brokers.append(row)
    _add_answers(view, answers)
    return view


def remote_view(bootstrap: str, answers: Answers) -> View:
    """A cluster of which only its own answers are known: nothing runs on this machine."""
    view = View(bootstrap)
    for broker in answers.cluster.brokers:
        view.brokers.append(BrokerRow(broker.node_id, broker.host, broker.port, FENCED, pid=None))
    _add_answers(view, answers, remote=True)
    return view


def _add_answers(view: View, answers: Answers | str, *, remote: bool = False) -> None:
    if isinstance(answers, str):
        view.why_not = answers
        return
    view.answered = True
    rows = {row.number: row for row in view.brokers}
    in_service = {broker.node_id for broker in answers.cluster.brokers if not broker.fenced}
    for row in view.brokers:
        told = answers.loads.get(row.number)
        if told is not None and row.load is None and remote:
            row.load = Load(100 * told.cpu, told.memory_bytes, told.disk_bytes)
        if row.load is not None:
            row.load.reported = told
        alive = remote or row.pid is not None
        if alive:
            row.state = RUNNING if row.number in in_service else FENCED
    for number in answers.quorum.voters if answers.quorum is not None else ():
        if number in rows:
            rows[number].controller = "voter"
    view.controller = answers.controller
    if answers.controller in rows:
        rows[answers.controller].controller = "leader"
    for topic in answers.topics:
        for partition in topic.partitions.values():
            view.total += 1
            view.offline += partition.leader == NO_NODE
            view.under_replicated += len(partition.isr) < len(partition.replicas)
            if partition.leader in rows:
                rows[partition.leader].leaders += 1
            for number in partition.replicas:
                if number in rows:
                    rows[number].replicas += 1


def columns_and_rows(view: View) -> tuple[list[str], list[list[object]]]:
    """The table of brokers."""
    columns = [
        "broker",
        "state",
        "controller",
        "address",
        "pid",
        "leaders",
        "replicas",
        "cpu",
        "memory",
        "disk",
        "net in/s",
        "net out/s",
        "msg/s",
    ]
    rows: list[list[object]] = []
    for row in view.brokers:
        used: list[object] = [""] * 6
        if row.load is not None:
            used[:3] = [
                f"{row.load.cpu_percent:.0f}%",
                amount(row.load.memory_bytes),
                amount(row.load.disk_bytes),
            ]
            if (told := row.load.reported) is not None:
                used[3:] = [amount(told.bytes_in), amount(told.bytes_out), f"{told.messages_in:.0f}"]
        role = "" if row.controller == "none" else row.controller
        address = f"{row.host}:{row.port}"
        rows.append([row.number, row.state, role, address, row.pid, row.leaders, row.replicas, *used])
    return columns, rows


def summary(view: View) -> str:
    """One line about the partitions, and one before it when nobody decides about them."""
    if not view.answered:
        return f"the cluster does not answer: {view.why_not}"
    partitions = f"{view.total} partitions, {view.offline} offline, {view.under_replicated} under-replicated"
    return partitions if view.controller is not None else f"{NO_CONTROLLER}\n{partitions}"


def amount(count: float) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


class Meter:
    """Measures what processes use, from one look at them to the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, float, float]] = {}
        self._last: dict[int, tuple[int, float, float]] = {}

    @property
    def fresh(self) -> bool:
        """Whether there is only one look yet, so that nothing can be said."""
        return not self._before

    def look(self, pids: dict[int, int]) -> None:
        """Take the processor time of these processes, by broker."""
        self._before, self._last = self._last, {}
        for number, pid in pids.items():
            used_s = _cpu_s(pid)
            if used_s is not None:
                self._last[number] = (pid, time.monotonic(), used_s)

    def load(self, number: int, directory: Path) -> Load | None:
        """What a broker used between the last two looks, its memory now, and its files."""
        if number not in self._last:
            return None
        pid, at_s, used_s = self._last[number]
        percent = 0.0
        if number in self._before and self._before[number][0] == pid:
            _, before_s, before_used_s = self._before[number]
            percent = 100 * (used_s - before_used_s) / max(at_s - before_s, 1e-3)
        return Load(percent, _memory_bytes(pid), _disk_bytes(directory))


def paused(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _cpu_s(pid: int) -> float | None:
    fields = _stat(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int) -> int:
    fields = _stat(pid)
    return 0 if fields is None else int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _disk_bytes(directory: Path) -> int:
    """Bytes on disk under a directory; files that go while they are counted are left out."""
    total, left, folders = 0, FILES_COUNTED_MAX, [str(directory)]
    while folders and left > 0:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                left -= 1
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
