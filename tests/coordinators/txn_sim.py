"""A cluster of transactions in one process, with a seed: producers, a coordinator, leaders, and everything that fails.

The coordinator's machine, the partitions' logs, producer state, transaction indexes and recovery are the production
code; around them time is a number, messages are lost, late and doubled, the coordinator and the leaders are killed at
any step, an old coordinator lives on and answers from what it remembers, and producers die or go on as zombies beside
their heirs. A reader follows each partition with read_committed all the while. `Sim.run` plays one seed and checks at
the end, when faults have stopped: what was committed is seen whole, once and in order, what was not is not seen at
all, and nothing holds readers back. `test_txn_sim` and the planted bugs use it.
"""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig, broker_config
from headrace.coordinators import txn_metadata
from headrace.coordinators.effects import Effects, Record, TimerKey, Write
from headrace.coordinators.txn_shard import Ended, Markers, TransactionShard
from headrace.coordinators.txn_states import ONGOING
from headrace.records.batch import parse_header
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.hanging import abort_older
from headrace.storage.log import PartitionLog
from headrace.storage.markers import EndTransactionMarker, marker_batch, parse_marker
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.origin import Origin
from headrace.storage.recovery import open_log

START_MS = 1_700_000_000_000
CALL_TIMEOUT_MS = 400
TXN_TIMEOUT_MS = 6000
FAULTS_UNTIL_MS = 30_000
QUIET_MS = 40_000
EVENTS_MAX = 400_000
ID = "copier"

RETRIABLE = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.LEADER_NOT_AVAILABLE,
    }
)


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Txn:
    """What one transaction of one producer wrote, and what is known of its end."""

    name: str
    writes: dict[int, list[bytes]] = field(default_factory=dict)
    asked_commit: bool = False
    outcome: str = ""


Reply = Callable[[Any], None]
Call = Generator[Callable[[Reply], None], Any, Any]


class Leader:
    """One partition: its log, who leads it, and what is replicated."""

    def __init__(self, sim: "Sim", index: int) -> None:
        self.sim, self.index = sim, index
        self.fs = MemoryFileSystem()
        self.directory = f"t-{index}"
        self.fs.makedirs(self.directory)
        self.config = TopicConfig(segment_bytes=600, index_interval_bytes=100)
        self.log = PartitionLog(self.fs, self.directory, "t", index, self.config, now_ms=START_MS)
        self.epoch = 0
        self.high_watermark = 0
        self.acks: list[tuple[int, Callable[[ErrorCode], None]]] = []
        self.position = 0
        self.seen: list[bytes] = []
        self.aborting: set[int] = set()

    def last_stable_offset(self) -> int:
        unstable = self.log.producer_state.first_unstable_offset(self.high_watermark)
        return self.high_watermark if unstable is None else min(unstable, self.high_watermark)

    def append(self, batch: bytes, origin: Origin, done: Callable[[ErrorCode], None]) -> None:
        try:
            appended = self.log.append(
                bytearray(batch), leader_epoch=self.epoch, now_ms=self.sim.now_ms, origin=origin
            )
        except KafkaError as error:
            done(error.code)
            return
        if appended.last_offset < self.high_watermark:
            done(ErrorCode.NONE)
            return
        self.acks.append((appended.last_offset + 1, done))
        self.sim.after(self.sim.chance.randrange(1, 30), self.replicate)

    def replicate(self) -> None:
        self.high_watermark = self.log.log_end_offset
        ready = [done for end, done in self.acks if end <= self.high_watermark]
        self.acks = [(end, done) for end, done in self.acks if end > self.high_watermark]
        for done in ready:
            done(ErrorCode.NONE)

    def fail(self) -> None:
        """Another replica leads: it may lack what was not replicated, and knows its producers from its log alone."""
        self.acks.clear()
        self.epoch += 1
        end = self.sim.chance.randint(self.high_watermark, self.log.log_end_offset)
        self.log.truncate_to(end)
        if self.sim.chance.random() < 0.5:
            self.log.flush()
            point = self.log.recovery_point
            self.log.close(clean=False)
            self.log = open_log(
                self.fs, self.directory, "t", self.index, self.config, clean=False, recovery_point=point
            )
        self.high_watermark = min(self.high_watermark, self.log.log_end_offset)
        self.sim.after(5, self.replicate)

    def produce(self, version: int, producer: tuple[int, int], batch: bytes, reply: Reply) -> None:
        state, epoch = self.log.producer_state, self.epoch
        if state.is_in_transaction(*producer):
            self.append(batch, Origin.CLIENT, reply)
            return
        guard = state.guard(producer[0])

        def verified(error: ErrorCode) -> None:
            if epoch != self.epoch:
                reply(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            elif error is not ErrorCode.NONE:
                reply(error)
            elif not state.is_in_transaction(*producer) and not state.is_guarded(producer[0], guard):
                reply(ErrorCode.NOT_ENOUGH_REPLICAS)  # as the handler of Produce: to be verified again
            else:
                self.append(batch, Origin.CLIENT, reply)

        asked = self.sim.current

        def answered(found: Any) -> None:
            if asked is not self.sim.current:  # one that was replaced says nothing
                verified(ErrorCode.NOT_COORDINATOR)
            else:
                verified(found if isinstance(found, ErrorCode) else ErrorCode.NETWORK_EXCEPTION)

        self.sim.call(lambda reply: asked.verify(version, producer, ("t", self.index), reply), answered)

    def write_marker(self, markers: Markers, coordinator_epoch: int, reply: Reply) -> None:
        marker = EndTransactionMarker(markers.committed, coordinator_epoch)
        batch = marker_batch((markers.producer_id, markers.epoch), marker, self.sim.now_ms)
        try:
            self.log.producer_state.check_marker(
                parse_header(batch), marker, transaction_version=markers.client_version
            )
        except KafkaError as error:
            reply(error.code)
            return
        if markers.committed:
            opened_by = markers.epoch - (markers.client_version >= txn_metadata.VERSION_2)
            abort_older(self.log, markers.producer_id, opened_by, self.epoch, self.sim.now_ms)
        self.append(batch, Origin.COORDINATOR, reply)

    def read(self) -> None:
        """What a read_committed reader gets next, filtered as clients do it."""
        end = self.last_stable_offset()
        while self.position < end:
            found = self.log.read(self.position, self.sim.chance.randrange(1, 800), max_offset=end)
            if not found.size:
                return
            aborted = sorted(
                self.log.aborted_transactions(self.position, found, end), key=lambda each: each[1]
            )
            for header, batch in iter_batches(found.read()):
                while aborted and aborted[0][1] <= header.last_offset:
                    self.aborting.add(aborted.pop(0)[0])
                records = [r for r in iter_records(batch) if r.offset >= self.position]
                if header.is_control:
                    marker = parse_marker(records[0].key, records[0].value) if records else None
                    if marker is not None and not marker.committed:
                        self.aborting.discard(header.producer_id)
                elif header.producer_id not in self.aborting:
                    self.seen += [r.value or b"" for r in records]
                self.position = header.next_offset
            self.aborting.clear()  # a reply's list is complete: the next one begins anew


class Incarnation:
    """A coordinator in one epoch. It may be replaced and not know it."""

    def __init__(self, sim: "Sim", epoch: int) -> None:
        self.sim, self.epoch = sim, epoch
        self.alive = True
        self.timers: dict[TimerKey, int] = {}
        self.machine = TransactionShard(lambda: sim.config, self.send)
        for record in sim.txn_log:
            self.machine.replay(*record)

    def begin(self) -> None:
        self.run(self.machine.loaded)

    @property
    def leads(self) -> bool:
        return self.sim.current is self

    def run(self, step: Callable[[int, Effects], None]) -> None:
        if not self.alive:
            return
        out = Effects()
        step(self.sim.now_ms, out)
        for key, delay_ms in out.timers.items():
            number = self.timers[key] = self.timers.get(key, 0) + 1
            if delay_ms is not None:
                self.sim.after(delay_ms, lambda key=key, number=number: self.ring(key, number))
        for ticket, body in out.replies:
            ticket(body)
        for write in out.writes:
            self.store(write)

    def ring(self, key: TimerKey, number: int) -> None:
        if self.timers.get(key) == number:
            self.run(lambda now_ms, out: self.machine.on_timer(key, now_ms, out))

    def store(self, write: Write) -> None:
        if self.leads:
            self.sim.txn_log += write.records
            self.sim.unstored.append((len(self.sim.txn_log), self, write))
            self.sim.after(self.sim.chance.randrange(1, 20), self.sim.commit_one)
        elif write.then is not None:
            self.sim.after(50, lambda: self.tell(write, ErrorCode.NOT_LEADER_OR_FOLLOWER))

    def tell(self, write: Write, error: ErrorCode) -> None:
        if write.then is not None:
            then = write.then
            self.run(lambda now_ms, out: then(error, now_ms, out))

    def send(self, markers: Markers) -> None:
        for where in markers.partitions:
            leader = self.sim.leaders[where[1]]

            def answered(found: Any, where: tuple[str, int] = where) -> None:
                error = found if isinstance(found, ErrorCode) else ErrorCode.NETWORK_EXCEPTION
                self.run(
                    lambda now_ms, out: self.machine.marked(
                        ID, markers.marking, [(where, error)], now_ms, out
                    )
                )

            self.sim.call(
                lambda reply, leader=leader: leader.write_marker(markers, self.epoch, reply),
                answered,
                # Without an epoch of its own for every transaction, a marker must not arrive after it was given up:
                # a link that is given up is closed, and what was on it is gone.
                strays=markers.client_version >= txn_metadata.VERSION_2,
            )

    def verify(self, version: int, producer: tuple[int, int], where: tuple[str, int], reply: Reply) -> None:
        if version >= txn_metadata.VERSION_2:
            self.run(
                lambda now_ms, out: self.machine.add_partitions(
                    ID, *producer, [where], version, reply, now_ms, out, waits=bool(where[1] % 2)
                )
            )
        else:
            self.run(
                lambda now_ms, out: self.machine.verify_partitions(
                    ID, *producer, [where], lambda found: reply(found[where]), out
                )
            )


class Sim:
    """One seed."""

    def __init__(self, seed: int, version: int, partitions: int = 3) -> None:
        self.chance = random.Random(seed)
        self.version = version
        self.now_ms = START_MS
        self.faults = True
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.config = broker_config({"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"})
        self.txn_log: list[Record] = []
        self.unstored: list[tuple[int, Incarnation, Write]] = []
        self.committed_to = 0
        self.zombie: Incarnation | None = None
        self.leaders = [Leader(self, index) for index in range(partitions)]
        self.next_producer_id = 100
        self.txns: list[Txn] = []
        self.clients = 0
        self.deserted = False
        self.current = Incarnation(self, 0)
        self.current.begin()

    @property
    def events(self) -> int:
        """How many things happened, or are still to happen."""
        return self._count

    @property
    def seen(self) -> int:
        """How many records the readers saw."""
        return sum(len(leader.seen) for leader in self.leaders)

    # -- time and messages ---------------------------------------------------------------------------------------------

    def after(self, delay_ms: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_ms + int(delay_ms), self._count, what))

    def call(
        self, request: Callable[[Reply], None], answer: Callable[[Any], None], strays: bool = True
    ) -> None:
        """A request and its reply, either of which may be lost, late or (the request) doubled; answered once."""
        answered = False

        def once(found: Any) -> None:
            nonlocal answered
            if not answered:
                answered = True
                answer(found)

        def back(found: Any) -> None:
            if not (self.faults and self.chance.random() < 0.08):
                self.after(self.chance.randrange(1, 40), lambda: once(found))

        copies = 1
        if self.faults:
            lot = self.chance.random()
            copies = 0 if lot < 0.08 else 2 if lot < 0.16 and strays else 1
        for _ in range(copies):
            late = self.faults and strays and self.chance.random() < 0.05
            delay_ms = self.chance.randrange(1, 3000 if late else 40)
            self.after(delay_ms, lambda: request(back))
        self.after(CALL_TIMEOUT_MS, lambda: once(ErrorCode.NETWORK_EXCEPTION))

    def coordinator(self) -> Incarnation:
        """The coordinator, as somebody believes who may have heard of it long ago."""
        if self.zombie is not None and self.zombie.alive and self.faults and self.chance.random() < 0.2:
            return self.zombie
        return self.current

    # -- what fails ----------------------------------------------------------------------------------------------------

    def commit_one(self) -> None:
        """Records of the coordinator are replicated, up to a point."""
        if self.unstored:
            end, incarnation, write = self.unstored.pop(0)
            self.committed_to = end
            incarnation.tell(write, ErrorCode.NONE)

    def fail_coordinator(self) -> None:
        """Another broker takes over with what is committed and perhaps more; the old one may linger."""
        old = self.current
        keep = self.chance.randint(0, len(self.unstored))
        end = self.unstored[keep - 1][0] if keep else self.committed_to
        lost, self.unstored = self.unstored, []
        del self.txn_log[end:]
        self.committed_to = len(self.txn_log)
        lingers = self.chance.random() < 0.5
        if self.zombie is not None:
            self.zombie.alive = False
        self.zombie = old if lingers else None
        old.alive = lingers
        self.current = Incarnation(self, old.epoch + 1)
        self.current.begin()
        if lingers:
            for _, _, write in lost:
                self.after(60, lambda write=write: old.tell(write, ErrorCode.NOT_LEADER_OR_FOLLOWER))
            self.after(self.chance.randrange(100, 3000), lambda: setattr(old, "alive", False))

    def fault(self) -> None:
        if not self.faults:
            return
        lot = self.chance.random()
        if lot < 0.4:
            self.fail_coordinator()
        elif lot < 0.9:
            self.chance.choice(self.leaders).fail()
        else:
            self.start_client()  # while the one before may still be at work
        self.after(self.chance.randrange(50, 1200), self.fault)

    # -- producers -----------------------------------------------------------------------------------------------------

    def start_client(self) -> None:
        self.clients += 1
        self._drive(self._client(self.clients), self.clients)

    def _drive(self, steps: Call, number: int) -> None:
        def resume(found: Any) -> None:
            if self.deserted:
                return
            try:
                request = steps.send(found)
            except StopIteration:
                if self.faults and number == self.clients:  # whoever runs it starts it again
                    self.after(self.chance.randrange(1, 500), self.start_client)
                return
            # Versions 0 and 1 cannot tell a late end of one transaction from that of the next: their clients rely on
            # connections, which lose what is on them when they are given up.
            self.call(request, resume, strays=self.version >= txn_metadata.VERSION_2)

        self.after(1, lambda: resume(None))

    def _until(self, request: Callable[[Reply], None]) -> Call:
        """Ask again until there is an answer that is none of 'try again'."""
        while True:
            found = yield request
            code = found.error if isinstance(found, Ended) else found
            if code not in RETRIABLE:
                return found
            yield lambda reply: self.after(20, lambda: reply(None))

    def _producer_id(self) -> int:
        self.next_producer_id += 1
        return self.next_producer_id

    def _client(self, number: int) -> Call:
        def initialize(reply: Reply) -> None:
            who = self.coordinator()
            who.run(
                lambda now_ms, out: who.machine.initialize(
                    ID, TXN_TIMEOUT_MS, None, self._producer_id(), reply, now_ms, out
                )
            )

        given = yield from self._until(initialize)
        if given.error is not ErrorCode.NONE:
            return
        producer = (given.producer_id, given.epoch)
        sequences: dict[int, int] = {}
        for count in range(1_000_000):
            if not self.faults:
                return
            if self.faults and self.chance.random() < 0.03:
                return  # it dies between two transactions
            txn = Txn(f"{number}.{count}")
            self.txns.append(txn)
            ended = yield from self._transaction(txn, producer, sequences)
            if ended is None:
                return
            if ended[0] != producer[0] or ended[1] != producer[1]:
                sequences = {}
            producer = ended

    def _transaction(self, txn: Txn, producer: tuple[int, int], sequences: dict[int, int]) -> Call:
        wanted = self.chance.sample(range(len(self.leaders)), self.chance.randint(1, len(self.leaders)))
        if self.version < txn_metadata.VERSION_2:

            def add(reply: Reply) -> None:
                who, partitions = self.coordinator(), [("t", index) for index in wanted]
                who.run(
                    lambda now_ms, out: who.machine.add_partitions(
                        ID, *producer, partitions, 0, reply, now_ms, out, waits=True
                    )
                )

            if (yield from self._until(add)) is not ErrorCode.NONE:
                return None
        for index in wanted * self.chance.randint(1, 2):
            value = f"{txn.name}/{index}/{len(txn.writes.get(index, ()))}".encode()
            sequence = sequences.get(index, 0)
            batch = build_batch(
                [(self.now_ms, b"k", value, ())],
                producer_id=producer[0],
                producer_epoch=producer[1],
                base_sequence=sequence,
                transactional=True,
            )
            txn.writes.setdefault(index, []).append(value)

            def produce(reply: Reply, index: int = index, batch: bytes = batch) -> None:
                self.leaders[index].produce(self.version, producer, batch, reply)

            error = yield from self._until(produce)
            if error is not ErrorCode.NONE:
                self._expect_fenced(producer, error, "produce")
                return None
            sequences[index] = sequence + 1
            if self.faults and self.chance.random() < 0.02:
                return None  # it dies in the middle of one
        commit = self.chance.random() < 0.7
        txn.asked_commit = commit

        def end(reply: Reply) -> None:
            who = self.coordinator()
            who.run(
                lambda now_ms, out: who.machine.end(
                    ID, *producer, commit, self.version, self._producer_id(), reply, now_ms, out
                )
            )

        ended = yield from self._until(end)
        if ended.error is not ErrorCode.NONE:
            self._expect_fenced(producer, ended.error, "end")
            return None
        txn.outcome = "commit" if commit else "abort"
        return (ended.producer_id, ended.epoch) if self.version >= txn_metadata.VERSION_2 else producer

    def _expect_fenced(self, producer: tuple[int, int], error: ErrorCode, step: str) -> None:
        """A producer that nobody replaced or timed out must not be told what it cannot get over."""
        metadata = self.current.machine.transactions.get(ID)
        if metadata is None or metadata.state is not ONGOING or metadata.pending is not None:
            return
        if (metadata.value.producer_id, metadata.value.producer_epoch) == producer:
            raise Violation(f"{step} of the producer at work was answered {error.name}")

    # -- one run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for leader in self.leaders:
            self._read_on(leader)
        self.start_client()
        self.after(200, self.fault)
        self._play(FAULTS_UNTIL_MS)
        self.faults = False
        if self.chance.random() < 0.5:
            self.start_client()
        else:
            self.deserted = True  # nobody comes back: what is open must time out
        self._play(QUIET_MS)
        self._check()

    def _read_on(self, leader: Leader) -> None:
        leader.read()
        self.after(97, lambda: self._read_on(leader))

    def _play(self, until_ms: int) -> None:
        end_ms = self.now_ms + until_ms
        while self._events and self._events[0][0] <= end_ms:
            if self._count > EVENTS_MAX:
                raise Violation("it never comes to rest")
            self.now_ms, _, what = heapq.heappop(self._events)
            what()
        self.now_ms = end_ms

    def _check(self) -> None:
        for leader in self.leaders:
            leader.read()
            if leader.last_stable_offset() != leader.log.log_end_offset:
                raise Violation(f"partition {leader.index} is held back at {leader.last_stable_offset()}")
            if len(set(leader.seen)) != len(leader.seen):
                raise Violation(f"a record is seen twice in partition {leader.index}")
        seen = {value for leader in self.leaders for value in leader.seen}
        for txn in self.txns:
            wrote = {value for values in txn.writes.values() for value in values}
            visible = wrote & seen
            if visible and visible != wrote:
                raise Violation(f"{txn.name} is seen in part: {visible} of {wrote}")
            if txn.outcome == "commit" and visible != wrote:
                raise Violation(f"{txn.name} was committed and is not seen")
            if visible and (txn.outcome == "abort" or not txn.asked_commit):
                raise Violation(f"{txn.name} was never committed and is seen")
        for leader in self.leaders:
            order = {value: number for number, value in enumerate(leader.seen)}
            for txn in self.txns:
                places = [order[value] for value in txn.writes.get(leader.index, ()) if value in order]
                if places != sorted(places):
                    raise Violation(f"{txn.name} is seen out of order")
