"""One seed, one life of a whole cluster: its size and settings, its clients, everything that goes wrong, and the end.

Each seed draws how durable records are, which kinds of fault there are and how often. A record that was acknowledged
with acks=all is never lost under any of these faults:

- *killed*: processes are killed at any moment, any number at a time; what they wrote is in the page cache.
- *one loses power*: besides, one machine may lose its power, and with it what was not synced. The run is excused, and
  ends, when that machine is the last in sync before it is back: then nobody can tell what it alone had.
- *flushed*: topics flush before they acknowledge, and any machine may lose its power at any moment.

After the bad times everything heals: every partition must find a leader, every replica come back into sync, everything
under way be acknowledged, and all replicas hold the same. `run` raises on the first violation.
"""

import gc
from collections.abc import Callable
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.cluster.image import ClusterImage
from headrace.records.batch import ATTRIBUTES_POSITION, HEADER_SIZE, parse_header
from headrace.replication.partition import Partition
from headrace.wire.apis import Api
from tests.sim.cluster_clients import SimAdmin, SimProducer, SimReader
from tests.sim.cluster_groups import Groups
from tests.sim.cluster_network import ClusterNetwork
from tests.sim.cluster_node import ClusterNode, SimDisk, simulated
from tests.sim.cluster_oracle import ClusterOracle, Excused, Key, changes, records_in
from tests.sim.cluster_transactions import Transactions
from tests.sim.kernel import MS, Kernel, Machine
from tests.sim.raft_oracle import Violation

SECOND = 1_000 * MS
SIZES = (3, 3, 3, 4, 5)
START_MAX = 20 * SECOND
START_STEP = 20 * MS
BAD_TIMES = (1 * SECOND, 1 * SECOND, 2 * SECOND, 3 * SECOND)
RECOVERY_STEP = 25 * MS
RECOVERY_MAX = 60 * SECOND
DURABILITIES = ("killed", "killed", "one loses power", "flushed")
COLLECT_EVERY = 5
TOPIC = "t"


class ClusterScenario:
    """A cluster and its fate."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kernel = kernel = Kernel(seed)
        self.random = chance = kernel.random
        self.net = ClusterNetwork(kernel)
        size = chance.choice(SIZES)
        self.ids = list(range(1, size + 1))
        self.voters = self.ids[:3] if size == 4 or chance.random() < 0.5 else self.ids
        self.durability = chance.choice(DURABILITIES)
        self.victim = chance.choice(self.ids)
        self.oracle = ClusterOracle({node: f"node-{node}:9092" for node in self.voters})
        self.groups = Groups(seed)
        self.transactions = Transactions(seed)
        more = self.groups.present or self.transactions.present
        self.partitions = max(chance.choice((1, 1, 2)), 2 if more else 1)
        self.replicas = chance.choice((2, 3, 3, 3))
        self.min_insync = chance.choice((1, 1, 2))
        self.disks = {node: SimDisk() for node in self.ids}
        self.skews = dict.fromkeys(self.ids, 0)
        self.election_ms = chance.choice((200, 300, 500))
        self.session_ms = chance.choice((400, 800, 1_500))
        self.lag_ms = chance.choice((300, 600, 1_500))
        self.fetch_wait_ms = min(chance.choice((50, 200, 500)), self.lag_ms // 3)
        self.sync_delay = chance.choice((MS // 2, 2 * MS, 20 * MS))
        self.segment_ms = chance.choice((50, 500, 60_000))
        self.snapshot_bytes = chance.choice((2_000, 20_000_000))
        self.machines: dict[int, Machine] = {}
        for node in self.ids:
            self.machines[node] = Machine(kernel, self.net, node, self._process)  # type: ignore[arg-type]
        self.excused = False
        """It ended early, because a machine lost its power while it was the last in sync."""
        self._bad = True
        self._slow: dict[int, int] = {}
        self.bad_times = chance.choice(BAD_TIMES) + (SECOND if more else 0)
        self._fault_gap = chance.choice((40, 100, 250)) * MS
        self._faults = self._draw(
            self._mend,
            self._start_all,
            self._start_all,
            self._kill_one,
            self._kill_leader,
            self._kill_controller,
            self._kill_all,
            self._power_cut,
            self._power_cut_soon,
            self._stop_one,
            self._pause,
            self._pause_leader,
            self._split,
            self._isolate_leader,
            self._cut_one_way,
            self._weather,
            self._slow_disk,
            self._jump_clock,
            self._configure,
            self._elect_preferred,
            self._reassign,
            self._flip,
        )
        self.keys: list[Key] = [(TOPIC, index) for index in range(self.partitions)]
        self.producers: list[SimProducer] = []
        self.readers: list[SimReader] = []
        common: tuple[Any, ...] = (kernel, self.net, self.oracle)
        self.admin = SimAdmin(*common, 100, self.ids)
        gap = chance.choice((30, 80, 200)) * MS
        for number, key in enumerate(self.keys):
            self.producers.append(SimProducer(*common, 110 + number, self.ids, key=key, acks=-1, gap=gap))
            if chance.random() < 0.5:
                self.producers.append(SimProducer(*common, 120 + number, self.ids, key=key, acks=-1, gap=gap))
            if chance.random() < 0.3:
                self.producers.append(SimProducer(*common, 130 + number, self.ids, key=key, acks=1, gap=gap))
            self.readers.append(SimReader(*common, 140 + number, self.ids, key=key))
        if self.groups.present:
            self._faults.append((self.groups.trouble_one, 2.0))
            self.groups.join(common, self.ids, TOPIC, self.partitions)
        if self.transactions.present:
            self._faults.append((self.transactions.kill_one, 1.0))
            self.transactions.begin(common, self.ids, self.keys)

    def _draw(self, *choices: Callable[[], None]) -> list[tuple[Callable[[], None], float]]:
        """Kinds of fault, each left out by some seeds and frequent in others."""
        return [(choice, self.random.choice((0.0, 0.5, 1.0, 3.0))) for choice in choices]

    def _settings(self, node: int) -> dict[str, str]:
        settings = {
            "node.id": str(node),
            "listeners": f"PLAINTEXT://node-{node}:9092",
            "log.dirs": f"data-{node}",
            "controller.quorum.voters": ",".join([f"{voter}@node-{voter}:9092" for voter in self.voters]),
            "process.roles": "broker,controller" if node in self.voters else "broker",
            "controller.quorum.election.timeout.ms": str(self.election_ms),
            "broker.heartbeat.interval.ms": str(self.session_ms // 4),
            "broker.session.timeout.ms": str(self.session_ms),
            "replica.lag.time.max.ms": str(self.lag_ms),
            "replica.fetch.wait.max.ms": str(self.fetch_wait_ms),
            "metadata.log.max.record.bytes.between.snapshots": str(self.snapshot_bytes),
            "auto.create.topics.enable": "false",
            "leader.imbalance.check.interval.seconds": "1",
        }
        if self.durability == "flushed":
            settings["log.flush.interval.messages"] = "1"
        for more in (self.groups, self.transactions):
            settings |= more.settings() if more.present else {}
        return settings

    def _process(self, machine: Machine) -> ClusterNode:
        self.oracle.raft.forget(machine.id)
        node = machine.id
        delay = self._slow.get(node, self.sync_delay) if self._bad else MS
        process = ClusterNode(
            machine,
            self.disks[node],
            self._settings(node),
            self.oracle,
            self.skews[node],
            delay,
            lambda: machine.crash(power_lost=self._may_lose_power(node)),
        )
        process.flushes = self.durability == "flushed"
        return process

    def _may_lose_power(self, node: int) -> bool:
        if self.durability == "flushed":
            return True
        return self.durability == "one loses power" and node == self.victim and not self.oracle.is_last(node)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Bad times, then good ones. Violation, or whatever a node asserted, when something does not hold."""
        with simulated(self.kernel):
            try:
                self._run()
            except Excused:
                self.excused = True
            finally:
                if self.seed % COLLECT_EVERY == 0:
                    gc.collect()

    def _run(self) -> None:
        kernel = self.kernel
        self.oracle.on_image = self._on_image
        kernel.trace(
            f"{len(self.ids)} nodes, voters {self.voters}, {self.partitions} partitions of {self.replicas}, "
            f"min.insync {self.min_insync}, {self.durability}, victim {self.victim}"
        )
        for machine in self.machines.values():
            kernel.after(self.random.randrange(100 * MS), self._start, machine)
        self._create_topic()
        while self.oracle.newest is None or TOPIC not in self.oracle.newest.topics:
            kernel.run(kernel.now + START_STEP)
            if kernel.now > START_MAX:
                raise Violation(f"liveness: {START_MAX // SECOND} s after the start there is no topic")
        kernel.after(self._gap(self._fault_gap), self._fault)
        kernel.run(kernel.now + self.bad_times)
        self._recover()
        self._check_end()
        if self.transactions.read_all:
            self.transactions.account.check_end()

    def _create_topic(self) -> None:
        configs = {
            "min.insync.replicas": str(self.min_insync),
            "segment.ms": str(self.segment_ms),
        }
        body = {
            "topics": [
                {
                    "name": TOPIC,
                    "num_partitions": self.partitions,
                    "replication_factor": self.replicas,
                    "assignments": [],
                    "configs": [{"name": name, "value": value} for name, value in configs.items()],
                }
            ],
            "timeout_ms": 1_000,
            "validate_only": False,
        }
        there = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)
        self.admin.until_done(
            Api.CREATE_TOPICS, 7, body, lambda reply: reply.topics[0].error_code in there, 10_000
        )

    def _recover(self) -> None:
        kernel = self.kernel
        self._bad = False
        kernel.trace("all is well again")
        self.net.heal()
        for producer in self.producers:
            producer.stopping = True
        self.groups.heal()
        self.transactions.heal()
        for node, machine in self.machines.items():
            self.disks[node].heal()
            machine.resume()
            if machine.up:
                flusher = machine.process.flusher
                if flusher is not None:
                    flusher.sync_delay = MS
        why = "nothing was looked at"
        end = kernel.now + RECOVERY_MAX
        while kernel.now < end:
            self._start_all()
            kernel.run(kernel.now + RECOVERY_STEP)
            why = self._unwell()
            if not why:
                return
        raise Violation(f"liveness: {RECOVERY_MAX // SECOND} s without a fault, and {why}")

    def _unwell(self) -> str:
        """What is not as it should be once everything has healed; empty when all is."""
        for machine in self.machines.values():
            if not machine.up or machine.process.process is None or not machine.process.process._started:
                return f"node {machine.id} is not started"
        image = self.oracle.newest
        if image is None or TOPIC not in image.topics:
            return "the topic is not there"
        for name, index, partition in [
            (name, *each) for name, topic in image.topics.items() for each in enumerate(topic.partitions)
        ]:
            if partition.leader < 0:
                return f"{name}-{index} has no leader: {partition}"
            if set(partition.isr) != set(partition.replicas) or partition.adding or partition.removing:
                return f"{name}-{index} is not in sync everywhere: {partition}"
        for producer in self.producers:
            if not producer.idle:
                return f"producer {producer.id} waits for {producer._values} of {producer.key}"
        ends: dict[Key, int] = {}
        for key in self.keys:
            held = [p for node, p in self._held(key)]
            leader = [p for p in held if p.is_leader and p.leader_epoch == max(q.leader_epoch for q in held)]
            if len(leader) != 1:
                return f"{len(leader)} nodes lead {key}"
            ends[key] = leader[0].log.log_end_offset
            if any(p.high_watermark != ends[key] for p in held):
                return f"the high watermarks of {key} are {[p.high_watermark for p in held]}"
        for reader in self.readers:
            if self.oracle.damaged is None and reader.position < max(
                self.oracle.settled.get(reader.key, {0: 0}), default=0
            ):
                return f"reader {reader.id} is at {reader.position} of {reader.key}"
        # A leader does not look at what it hands out: nobody may get past the bytes that are damaged there.
        return self.groups.unwell() or self.transactions.unwell(ends, self.oracle.damaged is None)

    def _held(self, key: Key) -> list[tuple[int, Partition]]:
        """The replicas of a partition that are open on running nodes."""
        found = []
        for machine in self.machines.values():
            broker = machine.process.broker if machine.up else None
            partition = broker.replicas.table.find(*key) if broker is not None else None
            if partition is not None:
                found.append((machine.id, partition))
        return found

    def _check_end(self) -> None:
        """Every replica holds the same, and all that it must."""
        for key in self.keys:
            held = [each for each in self._held(key) if each[0] != self.oracle.damaged]
            contents = {node: records_in(partition.log) for node, partition in held}
            first = next(iter(contents.values()))
            for node, content in contents.items():
                if content != first:
                    raise Violation(f"replicas of {key} differ: {contents}")
                self.oracle.check_replica(
                    node, key, dict(held)[node].log, dict(held)[node].log.log_end_offset + 1, "at the end"
                )
            self._check_counts(key, list(first.values()))

    def _check_counts(self, key: Key, values: list[bytes]) -> None:
        count: dict[bytes, int] = {}
        for value in values:
            count[value] = count.get(value, 0) + 1
        for producer in self.producers:
            if producer.key != key or producer.acks != -1:
                continue
            for value in producer.done_values:
                if count.get(value, 0) != 1:
                    raise Violation(
                        f"{value!r} was acknowledged, and is {count.get(value, 0)} times in {key}"
                    )
            twice = [value for value in producer.sent_values if count.get(value, 0) > 1]
            if twice:
                raise Violation(f"{twice} are more than once in {key}")

    def _on_image(self, old: ClusterImage | None, new: ClusterImage, end: int) -> None:
        if self.kernel.tracing:
            for change in changes(old, new):
                self.kernel.trace(f"image {end}: {change}")
        topic = new.topics.get(TOPIC)
        if topic is not None and (old is None or old.topics is not new.topics):
            for index, partition in enumerate(topic.partitions):
                if not partition.isr or not set(partition.isr) <= set(partition.replicas):
                    raise Violation(f"the ISR of {TOPIC}-{index} is not of its replicas: {partition}")
                self._check_isr(new, (TOPIC, index), partition.isr)

    def _check_isr(self, image: ClusterImage, key: Key, isr: tuple[int, ...]) -> None:
        """Whoever is in sync has all that anyone relies on, unless it runs anew and is about to say so."""
        settled = self.oracle.settled_end.get(key, 0)
        for node, partition in self._held(key):
            if node not in isr or node == self.oracle.damaged:
                continue
            registration = self.machines[node].process.process._registration
            known = image.brokers.get(node)
            if known is None or registration is None or registration.epoch != known.epoch:
                continue
            if partition.log.log_end_offset < settled:
                raise Violation(
                    f"the ISR of {key} is {isr}, node {node} ends at {partition.log.log_end_offset}, "
                    f"and all below {settled} is relied on"
                )

    def _gap(self, mean: int) -> int:
        return 1 + int(self.random.random() * 2 * mean)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if not self._bad:
            return
        self.kernel.after(self._gap(self._fault_gap), self._fault)
        faults = [fault for fault, _ in self._faults]
        weights = [weight for _, weight in self._faults]
        if any(weights):
            self.random.choices(faults, weights)[0]()

    def _any(self) -> Machine:
        return self.machines[self.random.choice(self.ids)]

    def _kill(self, machine: Machine) -> None:
        if machine.up:
            power_lost = self._may_lose_power(machine.id) and self.random.random() < 0.5
            machine.crash(power_lost=power_lost)
            self.kernel.after(self._gap(self.random.choice((20, 200, 1_000)) * MS), self._start, machine)

    def _start(self, machine: Machine) -> None:
        if not machine.up:
            machine.start()

    def _kill_one(self) -> None:
        self._kill(self._any())

    def _kill_all(self) -> None:
        for machine in self.machines.values():
            self._kill(machine)

    def _leader_machine(self) -> Machine:
        """One that leads a partition, by the newest image."""
        image = self.oracle.newest
        topic = None if image is None else image.topics.get(TOPIC)
        leaders = [] if topic is None else [p.leader for p in topic.partitions if p.leader >= 0]
        return self.machines[self.random.choice(leaders)] if leaders else self._any()

    def _kill_leader(self) -> None:
        self._kill(self._leader_machine())

    def _kill_controller(self) -> None:
        for machine in self.machines.values():
            if machine.up and machine.process.quorum is not None and machine.process.quorum.is_active:
                self._kill(machine)

    def _power_cut(self) -> None:
        machine = self._any() if self.durability == "flushed" else self.machines[self.victim]
        if machine.up and self._may_lose_power(machine.id):
            machine.crash(power_lost=True)
            self.kernel.after(self._gap(300 * MS), self._start, machine)

    def _power_cut_soon(self) -> None:
        """In the middle of an operation on the disk; as a kill where power is not lost."""
        machine = self._any()
        if machine.up:
            self.disks[machine.id].cut_power_after(self.random.randrange(100))
            self.kernel.after(self._gap(600 * MS), self._start, machine)

    def _stop_one(self) -> None:
        machine = self._any()
        if machine.up and not machine.process.stopping and machine.paused_until <= self.kernel.now:
            self.kernel.trace(f"{machine.id}: is told to stop")
            machine.process.stop()
            self.kernel.after(self._gap(700 * MS), self._start, machine)

    def _start_all(self) -> None:
        for machine in self.machines.values():
            self._start(machine)

    def _pause(self) -> None:
        self._pause_for(self._any(), self._gap(self.random.choice((50, 500, 1_500)) * MS))

    def _pause_leader(self) -> None:
        self._pause_for(self._leader_machine(), self._gap(self.session_ms * MS))

    def _pause_for(self, machine: Machine, duration: int) -> None:
        if machine.up and machine.paused_until <= self.kernel.now:  # one at a time: what waits stays in order
            machine.pause(duration)

    def _split(self) -> None:
        self.net.mend()
        clients = (*self.producers, *self.readers, *self.groups.members, *self.transactions.clients)
        everyone = {*self.ids, *[client.id for client in clients]}
        side = {each for each in everyone if self.random.random() < 0.5}
        self.kernel.trace(f"split {sorted(side)}")
        self.net.split(side, everyone)

    def _isolate_leader(self) -> None:
        machine = self._leader_machine()
        one_way = self.random.random() < 0.3
        self.kernel.trace(f"isolate {machine.id} {'one way' if one_way else ''}")
        self.net.split({machine.id}, set(self.ids), one_way=one_way)

    def _cut_one_way(self) -> None:
        here, there = self.random.sample(self.ids, 2)
        self.kernel.trace(f"cut {here} -> {there}")
        self.net.cut.add((here, there))

    def _mend(self) -> None:
        self.kernel.trace("mend")
        self.net.mend()

    def _weather(self) -> None:
        net, chance = self.net, self.random
        net.loss = chance.choice((0.0, 0.0, 0.02, 0.1))
        net.resets = chance.choice((0.0, 0.0, 0.005, 0.03))
        net.post_loss = chance.choice((0.0, 0.0, 0.05, 0.2))
        net.post_copies = chance.choice((0.0, 0.1))
        net.post_stray = chance.choice((0.0, 0.1))
        net.delay_spread = chance.choice((MS, 5 * MS, 40 * MS))

    def _slow_disk(self) -> None:
        machine = self._any()
        self._slow[machine.id] = self.random.choice((1, 30, 300)) * MS
        if machine.up and machine.process.flusher is not None:
            machine.process.flusher.sync_delay = self._slow[machine.id]

    def _jump_clock(self) -> None:
        machine = self._any()
        self.skews[machine.id] = self.random.choice((-1_800_000, -2_000, 0, 2_000, 1_800_000))
        if machine.up:
            machine.process.clock.skew_ms = self.skews[machine.id]

    def _configure(self) -> None:
        """Change how many replicas must be in sync."""
        value = self.random.randrange(1, 3)
        self.kernel.trace(f"min.insync.replicas={value}")
        body = {
            "resources": [
                {
                    "resource_type": 2,
                    "resource_name": TOPIC,
                    "configs": [{"name": "min.insync.replicas", "config_operation": 0, "value": str(value)}],
                }
            ],
            "validate_only": False,
        }
        self.admin.until_done(
            Api.INCREMENTAL_ALTER_CONFIGS, 1, body, lambda reply: reply.responses[0].error_code == 0, 3
        )

    def _elect_preferred(self) -> None:
        body = {"election_type": 0, "topic_partitions": None, "timeout_ms": 1_000}
        self.admin.until_done(Api.ELECT_LEADERS, 2, body, lambda reply: True, 2)

    def _reassign(self) -> None:
        """Move a partition to other nodes."""
        index = self.random.randrange(self.partitions)
        replicas = self.random.sample(self.ids, min(self.replicas, len(self.ids)))
        self.kernel.trace(f"reassign {index} to {replicas}")
        moved = [{"partition_index": index, "replicas": replicas}]
        body = {"timeout_ms": 1_000, "topics": [{"name": TOPIC, "partitions": moved}]}
        self.admin.until_done(Api.ALTER_PARTITION_REASSIGNMENTS, 0, body, lambda reply: True, 2)

    def _flip(self) -> None:
        """Damage a byte of a batch that its CRC covers, always on one machine, where others never lost power."""
        if self.durability != "killed" or self.oracle.is_last(self.victim):
            return
        fs, index = self.disks[self.victim], self.random.randrange(self.partitions)
        directory = f"{TOPIC}-{index}"
        names = (
            [name for name in fs.listdir(directory) if name.endswith(".log")] if fs.exists(directory) else []
        )
        names = [name for name in names if fs.size(f"{directory}/{name}") > HEADER_SIZE]
        if names:
            path = f"{directory}/{self.random.choice(names)}"
            data = bytes(
                fs.map(path, fs.size(path))
            )  # no step of the machine's own, in which its power could go
            start = 0
            while start + HEADER_SIZE < len(data) and self.random.random() < 0.8:
                after = start + parse_header(data, start).size
                if after + HEADER_SIZE >= len(data):
                    break
                start = after
            at = min(start + self.random.randrange(ATTRIBUTES_POSITION, HEADER_SIZE), len(data) - 1)
            self.kernel.trace(f"{self.victim}: byte {at} of {path} is damaged")
            self.oracle.damage(self.victim)
            fs.flip(path, at, self.random.randrange(8))


def run_seed(seed: int, *, trace: Callable[[str], None] | None = None) -> ClusterScenario:
    """Run one seed; the scenario as it ended."""
    scenario = ClusterScenario(seed)
    scenario.kernel.tracing = trace
    scenario.run()
    return scenario
