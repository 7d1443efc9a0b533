"""One seed, one life of a Raft cluster: its size and settings, its clients, everything that goes wrong, and the end.

Each seed draws which kinds of fault there are and how often, so that some runs are all about elections and others about
snapshots or membership. After the bad times everything heals, and the cluster must find a leader, commit, and bring
every node to the same state. `run` raises on the first violation; what it raises is the same for the same seed.
"""

from collections.abc import Callable
from typing import Any

from headrace.consensus.raft.messages import TransferNow, Voters
from headrace.consensus.raft.node import RaftNode
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from tests.sim.kernel import MS, Kernel, Machine, Network
from tests.sim.raft_disk import FileDisk, LightDisk
from tests.sim.raft_oracle import RaftOracle, Violation
from tests.sim.raft_process import TICK, RaftProcess

SIZES = (1, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5)
OBSERVERS = (0, 0, 1, 1, 2)
BAD_TIMES = 2_000 * MS
RECOVERY_ELECTIONS = 60  # election timeouts within which a healed cluster must be well
FILE_DISK_SHARE = 0.02


class RaftScenario:
    """A cluster and its fate."""

    def __init__(self, seed: int, *, files: bool | None = None) -> None:
        self.seed = seed
        self.kernel = kernel = Kernel(seed)
        self.random = chance = kernel.random
        self.network = Network(kernel)
        size = chance.choice(SIZES)
        observers = chance.choice(OBSERVERS)
        self.voters: Voters = {node: f"node-{node}" for node in range(1, size + 1)}
        self.ids = list(range(1, size + observers + 1))
        self.settings = RaftSettings(
            election_ticks=chance.choice((6, 8, 10, 15)),
            heartbeat_ticks=2,
            append_bytes_max=chance.choice((30, 30, 100, 10_000)),
            inflight_appends_max=chance.choice((1, 3, 32)),
            inflight_bytes_max=chance.choice((60, 10_000)),
            chunk_bytes_max=chance.choice((40, 10_000)),
            apply_bytes_max=chance.choice((50, 10_000)),
            observer_ticks=30,
        )
        self.oracle = RaftOracle(self.voters)
        self.snapshot_entries = chance.choice((0, 0, 5, 20))
        self.keep_entries = chance.choice((0, 3))
        self.sync_delay = chance.choice((MS // 2, 2 * MS, 30 * MS))
        self.sync_fails = chance.choice((0.0, 0.0, 0.005))
        disk_kind: Callable[..., Any] = LightDisk
        if files or (files is None and chance.random() < FILE_DISK_SHARE):
            disk_kind = FileDisk
        self.disks = {node: disk_kind(chance) for node in self.ids}
        self.oracle.disks = self.disks
        self.machines = {node: Machine(kernel, self.network, node, self._process) for node in self.ids}
        kernel.after_step = self._check
        self.acknowledged_end = 0
        self._proposed = 0
        self._bad = True
        self._propose_gap = chance.choice((15, 40, 120)) * MS
        self._fault_gap = chance.choice((40, 100, 250)) * MS
        self._faults = self._draw(
            self._heal,
            self._start_all,
            self._start_all,
            self._stand_for_election,
            self._crash_one,
            self._crash_leader,
            self._crash_all,
            self._split,
            self._isolate_leader,
            self._cut_one_way,
            self._weather,
            self._pause,
            self._slow_disk,
            self._transfer,
            self._change_voters,
            self._snapshot,
        )
        # Many a bug needs a leader that is gone as soon as it has begun.
        self._troubled_elections = chance.choice((0.0, 0.3, 0.8))
        self._troubles = self._draw(
            self._isolate_leader,
            self._crash_leader,
            self._split,
            self._change_voters,
            self._transfer,
            self._stand_for_election,
        )
        self.oracle.on_leader = self._on_leader

    def _process(self, machine: Machine) -> RaftProcess:
        self.oracle.forget(machine.id)
        process = RaftProcess(machine, self.disks[machine.id], self.voters, self.settings, self.oracle)
        process.snapshot_entries = self.snapshot_entries
        process.keep_entries = self.keep_entries
        if self._bad:
            process.sync_delay = self.sync_delay
            process.sync_fails = self.sync_fails
        return process

    def _check(self, machine: Machine) -> None:
        if machine.process is not None:
            self.oracle.check(machine.process.node)

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Bad times, then good ones. Violation, or whatever a node asserted, when something does not hold."""
        kernel = self.kernel
        for machine in self.machines.values():
            machine.start()
        kernel.after(self._gap(self._propose_gap), self._propose)
        kernel.after(self._gap(self._fault_gap), self._fault)
        kernel.run(BAD_TIMES)
        self._recover()

    def _recover(self) -> None:
        kernel = self.kernel
        self._bad = False
        self.network.heal()
        for machine in self.machines.values():
            machine.paused_until = 0
            if not machine.up:
                machine.start()
            machine.process.sync_delay = MS // 2
            machine.process.sync_fails = 0.0
        kernel.trace("all is well again")
        before = self.acknowledged_end
        election = self.settings.election_ticks * TICK
        for _ in range(RECOVERY_ELECTIONS):
            kernel.run(kernel.now + election)
            if self.acknowledged_end > before and self._all_agree():
                return
        states = "; ".join([self._describe(machine) for machine in self.machines.values()])
        raise Violation(
            f"liveness: {RECOVERY_ELECTIONS} election timeouts without a fault, and no common state: {states}"
        )

    def _all_agree(self) -> bool:
        end = len(self.oracle.committed)
        return all(machine.process.node.log.applied >= end - 4 for machine in self.machines.values())

    def _describe(self, machine: Machine) -> str:
        node: RaftNode = machine.process.node
        log = node.log
        return (
            f"{node.id} {node.role.value} term {node.term} leader {node.leader} log {log.start}..{log.end} "
            f"commit {log.commit} applied {log.applied} voters {sorted(node.voters)}"
        )

    def _gap(self, mean: int) -> int:
        return 1 + int(self.random.random() * 2 * mean)

    # -- clients ---------------------------------------------------------------------------------------------

    def _leaders(self) -> list[RaftProcess]:
        """Those that believe they lead."""
        return [
            machine.process
            for machine in self.machines.values()
            if machine.up and machine.paused_until <= self.kernel.now and machine.process.node.leadership
        ]

    def _propose(self) -> None:
        self.kernel.after(self._gap(self._propose_gap), self._propose)
        leaders = self._leaders()
        if not leaders:
            return
        process = self.random.choice(leaders)
        if self.random.random() < 0.2:
            self._read(process)
        entries = []
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            self._proposed += 1
            entries.append(b"entry %d" % self._proposed)
        process.propose(entries, self._acknowledged)
        self._check(process.machine)

    def _acknowledged(self, end: int) -> None:
        self.acknowledged_end = max(self.acknowledged_end, end)
        leaders = self._leaders()
        if len(leaders) > 1:  # one of them is of the past, and must not answer as if nothing had happened
            for process in leaders:
                self.kernel.after(0, self._read_now, process)

    def _read_now(self, process: RaftProcess) -> None:
        if process.machine.process is process:
            self._read(process)
            self._check(process.machine)

    def _read(self, process: RaftProcess) -> None:
        try:
            process.node.read(self.acknowledged_end)
        except Refused:
            return
        process.driver.pump()

    # -- faults ----------------------------------------------------------------------------------------------

    def _draw(self, *kinds: Callable[[], None]) -> list[Callable[[], None]]:
        """Some kinds of fault, each as likely as chance has it in this run."""
        drawn = [kinds[0]]
        for kind in kinds:
            drawn += [kind] * self.random.choice((0, 1, 1, 3))
        return drawn

    def _fault(self) -> None:
        if self._bad:
            self.kernel.after(self._gap(self._fault_gap), self._fault)
            self.random.choice(self._faults)()

    def _on_leader(self, node_id: int) -> None:
        if self._bad and self.random.random() < self._troubled_elections:
            delay = self.random.choice((0, 0, 1, 2, 4, 20)) * MS
            self.kernel.after(delay, self._if_bad, self.random.choice(self._troubles))
            if self.random.random() < 0.5:
                self.kernel.after(self._gap(150 * MS), self._heal)

    def _if_bad(self, trouble: Callable[[], None]) -> None:
        if self._bad:
            trouble()

    def _any(self) -> Machine:
        return self.machines[self.random.choice(self.ids)]

    def _crash(self, machine: Machine) -> None:
        if machine.up:
            machine.crash(power_lost=self.random.random() < 0.7)
            if self.random.random() < 0.5:
                self.kernel.after(self._gap(100 * MS), self._start, machine)

    def _start(self, machine: Machine) -> None:
        if not machine.up:
            machine.start()

    def _stand_for_election(self) -> None:
        """Someone does not wait, as when a leader asks for it: whoever stands for election when, safety holds."""
        machine = self._any()
        if machine.up and machine.paused_until <= self.kernel.now:
            node = machine.process.node
            machine.process.receive(node.id, TransferNow(node.id, node.id, node.term))
            self._check(machine)

    def _crash_one(self) -> None:
        self._crash(self._any())

    def _crash_leader(self) -> None:
        for process in self._leaders():
            self._crash(process.machine)

    def _crash_all(self) -> None:
        for machine in self.machines.values():
            self._crash(machine)

    def _start_all(self) -> None:
        for machine in self.machines.values():
            self._start(machine)

    def _split(self) -> None:
        self.network.cut.clear()
        side = {node for node in self.ids if self.random.random() < 0.5}
        self.kernel.trace(f"split {side}")
        self.network.split(side)

    def _isolate_leader(self) -> None:
        for process in self._leaders():
            self.kernel.trace(f"isolate {process.machine.id}")
            self.network.split({process.machine.id}, one_way=self.random.random() < 0.3)

    def _cut_one_way(self) -> None:
        if len(self.ids) > 1:
            here, there = self.random.sample(self.ids, 2)
            self.kernel.trace(f"cut {here} -> {there}")
            self.network.cut.add((here, there))

    def _heal(self) -> None:
        self.kernel.trace("heal")
        self.network.cut.clear()

    def _weather(self) -> None:
        """How the network is from now on."""
        network, chance = self.network, self.random
        network.loss = chance.choice((0.0, 0.0, 0.05, 0.3))
        network.duplication = chance.choice((0.0, 0.1, 0.5))
        network.ordered = chance.random() < 0.5
        network.straggling = chance.choice((0.0, 0.02, 0.2))
        network.delay_spread = chance.choice((MS, 5 * MS, 40 * MS))

    def _pause(self) -> None:
        machine = self._any()
        if machine.up:
            duration = self._gap(200 * MS)
            machine.pause(duration)
            self.kernel.after(duration, self._read_now, machine.process)  # before it hears what it has missed

    def _slow_disk(self) -> None:
        machine = self._any()
        if machine.up:
            machine.process.sync_delay = self.random.choice((1, 50, 300)) * MS

    def _transfer(self) -> None:
        for process in self._leaders():
            self._try(process, process.node.transfer, self.random.choice(self.ids))

    def _change_voters(self) -> None:
        for process in self._leaders():
            for node in self.random.choices(self.ids, k=self.random.choice((1, 1, 3))):
                if node in process.node.voters:
                    self._try(process, process.node.remove_voter, node)
                else:
                    self._try(process, process.node.add_voter, node, f"node-{node}")

    def _try(self, process: RaftProcess, wish: Callable[..., object], *args: object) -> None:
        try:
            wish(*args)
        except Refused:
            return
        self.kernel.trace(f"{process.machine.id}: {wish.__name__} {args}")
        process.driver.pump()
        self._check(process.machine)

    def _snapshot(self) -> None:
        machine = self._any()
        if machine.up:
            machine.process.make_snapshot()


def run_seed(
    seed: int, *, files: bool | None = None, trace: Callable[[str], None] | None = None
) -> RaftScenario:
    """Run one seed; the scenario as it ended."""
    scenario = RaftScenario(seed, files=files)
    scenario.kernel.tracing = trace
    scenario.run()
    return scenario
