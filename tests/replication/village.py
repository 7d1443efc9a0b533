"""A few brokers' replicas in one process, on a clock, a network and a controller that a seed drives.

Each house runs the real `Replicas` over real logs in memory. The controller is small and strict: one image, changed by
proposals, deaths and returns, that reaches every house in order and late. A fetch or its reply may be delayed, or lost
with its connection, in which case the leader may have served it all the same. A house that dies loses what it had in
memory, and, when the power went, what its log had not flushed. The oracle knows what each producer was told.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import topic_config
from headrace.cluster.image import EMPTY, ClusterImage, apply
from headrace.cluster.partition_control import IsrProposal
from headrace.cluster.records import BrokerRecord, PartitionRecord, TopicRecord
from headrace.records.builder import build_batch, iter_records
from headrace.replication.fetcher import FetchLimits
from headrace.replication.isr import Answered
from headrace.replication.partition import Partition
from headrace.replication.replicas import Replicas, ReplicaSettings
from headrace.replication.serving import FetchReply
from headrace.storage.faulty import FaultyFileSystem
from headrace.storage.log import PartitionLog
from headrace.storage.recovery import open_log
from headrace.wire.fetch import FetchRequest

TOPIC, TOPIC_ID = "t", b"t" * 16
SETTINGS = ReplicaSettings(lag_max_ms=1_000, limits=FetchLimits(100, 4_000, 1_000))


class House:
    """One broker."""

    def __init__(self, village: "Village", node_id: int) -> None:
        self.village = village
        self.node_id = node_id
        self.fs = FaultyFileSystem()
        self.settings = SETTINGS
        self.life = 0
        self.alive = False
        self.image = EMPTY
        self.replicas: Replicas | None = None
        self.logs: dict[tuple[str, int], PartitionLog] = {}

    # -- the edge ------------------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        return self.village.now_ms

    def wall_ms(self) -> int:
        return int(self.village.now_ms)

    def later(self, delay_ms: float, work: Callable[[], None]) -> None:
        """Do it if this house still lives the same life."""
        life = self.life
        self.village.at(delay_ms, lambda: work() if self.alive and self.life == life else None)

    def defer(self, work: Callable[[], None]) -> None:
        self.later(0, work)

    def wake_at(self, at_ms: float) -> None:
        if at_ms < self._wake_ms:
            self._wake_ms = at_ms
            self.later(max(at_ms - self.now_ms(), 0), self._woken)

    def _woken(self) -> None:
        if self._wake_ms <= self.now_ms():
            self._wake_ms = float("inf")
            self.tick()

    def tick(self) -> None:
        assert self.replicas is not None
        self.replicas.tick()

    def flush(self, partition: Partition) -> None:
        def done() -> None:
            assert self.replicas is not None
            partition.log.flush()
            self.replicas.on_flushed(partition)

        self.later(self.village.rng.uniform(0, 5), done)

    def truncated(self, partition: Partition) -> None:
        """A village keeps no recovery points: every log is scanned whole."""

    def send_fetch(self, leader: int, number: int, request: FetchRequest) -> None:
        self.village.carry_fetch(self, leader, number, request)

    def alter_partitions(self, proposals: Sequence[IsrProposal], answered: Answered) -> None:
        self.village.carry_proposals(self, proposals, answered)

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        self.alive = True
        self.image = EMPTY
        self._wake_ms = float("inf")
        self.logs = {}
        self.replicas = Replicas(self.node_id, self, self, self.open, self.delete, self.settings)
        self._tick_on()

    def _tick_on(self) -> None:
        self.tick()
        self.later(200, self._tick_on)

    def open(self, topic: str, index: int, topic_id: bytes) -> PartitionLog:
        directory = f"{topic}-{index}"
        config = topic_config(self.village.settings)
        if directory in self.fs.listdir(""):
            log = open_log(self.fs, directory, topic, index, config, clean=False)
        else:
            self.fs.makedirs(directory)
            log = PartitionLog(self.fs, directory, topic, index, config)
        self.logs[topic, index] = log
        return log

    def delete(self, topic: str, index: int) -> None:
        self.logs.pop((topic, index)).delete()

    def stop(self, power_cut: bool) -> None:
        """Die; a power cut takes what the disk had not been made to keep, or a part of it."""
        if power_cut:
            self.fs.crash(self.village.rng)
        self.alive = False
        self.replicas = None

    def take(self, image: ClusterImage) -> None:
        assert self.replicas is not None
        old, self.image = self.image, image
        self.replicas.apply(old, image)
        while self.replicas.table.open_some(10):
            pass
        while self.replicas.table.delete_some(10):
            pass

    def partition(self) -> Partition | None:
        return None if self.replicas is None else self.replicas.table.find(TOPIC, 0)


class Village:
    """All of them, the controller among them, and the oracle."""

    def __init__(self, seed: int, replicas: int = 3, **settings: str) -> None:
        self.rng = random.Random(seed)
        self.settings = {name.replace("_", "."): value for name, value in settings.items()}
        self.now_ms = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._values = count()
        self.houses = {n: House(self, n) for n in range(1, replicas + 1)}
        self.lossy = 0.0
        self.cut_off: set[int] = set()
        self.ambush = False
        self.truth = EMPTY
        self._log: list[ClusterImage] = []
        self._epochs = count(1)
        self._last_arrival: dict[tuple[str, int, int], float] = {}
        self.acked: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.sent = 0
        ids = tuple(self.houses)
        self._commit([TopicRecord(TOPIC, TOPIC_ID), PartitionRecord(TOPIC_ID, 0, ids, ids, 1, 0, 0)])
        for house in self.houses.values():
            house.start()
            self.register(house)

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, delay_ms: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ms + delay_ms, next(self._numbers), work))

    def run(self, for_ms: float) -> None:
        end_ms = self.now_ms + for_ms
        while self._queue and self._queue[0][0] <= end_ms:
            self.now_ms, _, work = heapq.heappop(self._queue)
            work()
            self.check()
        self.now_ms = end_ms

    def _arrival(self, kind: str, source: int, target: int) -> float:
        """A delay that keeps messages of one connection in order. Images are late now and then."""
        slow = kind == "image" and self.rng.random() < 0.2
        at_ms = self.now_ms + self.rng.expovariate(0.02 if slow else 0.5)
        at_ms = max(at_ms, self._last_arrival.get((kind, source, target), 0.0))
        self._last_arrival[kind, source, target] = at_ms
        return at_ms - self.now_ms

    # -- the network ---------------------------------------------------------------------------------------------------

    def carry_fetch(self, follower: House, leader: int, number: int, request: FetchRequest) -> None:
        cut = bool({leader, follower.node_id} & self.cut_off)
        lost = cut or self.rng.random() < self.lossy
        target = self.houses[leader]

        def lose() -> None:
            assert follower.replicas is not None
            follower.replicas.lost(leader, number)

        def deliver() -> None:
            if not target.alive:
                follower.later(1, lose)
                return
            assert target.replicas is not None
            answered: list[bool] = []

            def reply(answer: FetchReply) -> None:
                answered.append(True)
                whole = _copied(answer)
                if lost or {leader, follower.node_id} & self.cut_off:
                    return

                def arrive() -> None:
                    assert follower.replicas is not None
                    follower.replicas.replied(leader, number, whole)

                follower.later(self._arrival("reply", leader, follower.node_id), arrive)

            session = target.replicas.fetch(request, reply)
            if session is not None:
                target.later(request.max_wait_ms, lambda: None if answered else session.answer())

        delay_ms = self._arrival("fetch", follower.node_id, leader)
        if not cut and (
            not lost or self.rng.random() < 0.5
        ):  # a lost connection may have carried the request all the same
            self.at(delay_ms + (self.rng.uniform(0, 300) if lost else 0), deliver)
        if lost:
            follower.later(delay_ms + 20, lose)
        else:
            follower.later(3_000, lose)  # the link's own deadline; nothing when it was answered

    def carry_proposals(self, leader: House, proposals: Sequence[IsrProposal], answered: Answered) -> None:
        if leader.node_id in self.cut_off or self.rng.random() < self.lossy:
            leader.later(50, lambda: answered(None))
            if self.rng.random() < 0.5:
                self.at(self.rng.uniform(1, 400), lambda: self._decide(leader.node_id, proposals))
            return

        def decide() -> None:
            errors = self._decide(leader.node_id, proposals)
            leader.later(self.rng.expovariate(0.3), lambda: answered(errors))

        self.at(self.rng.expovariate(0.3), decide)

    # -- the controller ------------------------------------------------------------------------------------------------

    @property
    def registration(self):
        return self.truth.topics[TOPIC].partitions[0]

    def _decide(self, leader: int, proposals: Sequence[IsrProposal]) -> list[ErrorCode]:
        errors = []
        for proposal in proposals:
            now = self.registration
            epochs = {n: b.epoch for n, b in self.truth.brokers.items() if b.may_lead}
            members = dict(proposal.isr)
            if now.leader != leader or proposal.leader_epoch != now.leader_epoch:
                errors.append(ErrorCode.FENCED_LEADER_EPOCH)
            elif proposal.partition_epoch != now.partition_epoch:
                errors.append(ErrorCode.INVALID_UPDATE_VERSION)
            elif (leader not in members and not members.keys() & set(now.isr)) or any(
                e not in (-1, epochs.get(n)) or (n not in now.isr and e == -1) for n, e in members.items()
            ):
                errors.append(ErrorCode.INELIGIBLE_REPLICA)
            else:
                joined = [n for n, _ in proposal.isr if n not in now.isr]
                self._change(isr=tuple([n for n, _ in proposal.isr]))
                errors.append(ErrorCode.NONE)
                if self.ambush and joined:
                    self._strike(joined[0])
        return errors

    def _strike(self, newcomer: int) -> None:
        """Just as a replica came into the ISR, and perhaps before its leader knows, leave it alone in the world."""
        self.ambush = False
        self.cut_off.add(newcomer)
        self.at(100, lambda: self.cut_off.discard(newcomer))
        for delay_ms in (0.1, 1, 2, 4):
            self.at(delay_ms, self.produce)
        for node_id in self.houses:
            if node_id != newcomer:
                self.at(self.rng.uniform(10, 40), lambda node_id=node_id: self.kill(node_id, at_once=True))

    def _change(self, **changes: object) -> None:
        now = self.registration._replace(**changes)  # type: ignore[arg-type]
        may_lead = {n for n, b in self.truth.brokers.items() if b.may_lead}
        if now.leader not in may_lead or now.leader not in now.isr:
            able = [n for n in now.isr if n in may_lead]
            now = now._replace(leader=able[0] if able else -1, leader_epoch=now.leader_epoch + 1)
        now = now._replace(partition_epoch=now.partition_epoch + 1)
        self._commit([PartitionRecord(TOPIC_ID, 0, *now)])

    def _commit(self, records: list[object]) -> None:
        self.truth = apply(self.truth, records)  # type: ignore[arg-type]
        self._log.append(self.truth)
        for house in self.houses.values():
            if house.alive:
                self._tell(house, self.truth)

    def _tell(self, house: House, image: ClusterImage) -> None:
        def take() -> None:
            if house.node_id in self.cut_off:
                house.later(100, take_latest)
            else:
                house.take(image)

        def take_latest() -> None:
            if house.node_id in self.cut_off:
                house.later(100, take_latest)
            elif self.truth is not house.image:
                house.take(self.truth)

        house.later(self._arrival("image", 0, house.node_id), take)

    def register(self, house: House) -> None:
        self._commit([BrokerRecord(house.node_id, "h", 1, None, next(self._epochs))])
        self._change()

    def fence(self, node_id: int) -> None:
        """The controller takes a broker for dead. The last in sync stays in the ISR, though it cannot lead."""
        broker = self.truth.brokers[node_id]
        if broker.fenced:
            return
        self._commit([BrokerRecord(*broker[:6], True)])
        rest = tuple([n for n in self.registration.isr if n != node_id])
        self._change(isr=rest or self.registration.isr)

    # -- what happens --------------------------------------------------------------------------------------------------

    def kill(self, node_id: int, power_cut: bool = False, at_once: bool = False) -> None:
        house = self.houses[node_id]
        if house.alive:
            house.stop(power_cut)
            noticed_ms = 0 if at_once else self.rng.uniform(0, 200)
            self.at(noticed_ms, lambda: None if house.alive else self.fence(node_id))

    def revive(self, node_id: int) -> None:
        """Start a dead one; have a live one that the controller took for dead register again."""
        house = self.houses[node_id]
        if not house.alive:
            self.fence(node_id)
            house.start()
            self.register(house)
        elif self.truth.brokers[node_id].fenced:
            self.register(house)

    def produce(self) -> None:
        """A client sends a record to whoever it takes for the leader: any house that does so itself."""
        leaders = [h for h in self.houses.values() if (p := h.partition()) is not None and p.is_leader]
        if not leaders:
            return
        house = self.rng.choice(leaders)
        partition = house.partition()
        assert partition is not None
        value = b"%d" % next(self._values)
        try:
            partition.check_min_insync()
            records = memoryview(bytearray(build_batch([(1000, None, value, ())])))
            appended = partition.append(records, int(self.now_ms))
        except KafkaError:
            return
        self.sent += 1
        end = appended.last_offset + 1
        if appended.flush_due:
            house.flush(partition)

        def done(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                assert self.acked.setdefault(appended.first_offset, value) == value
                self._note_committed(partition)

        if partition.is_safe(end, appended.flush_due, True):
            done(ErrorCode.NONE)
        else:
            partition.when_safe(end, appended.flush_due, True, done)

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for house in self.houses.values():
            partition = house.partition()
            if partition is not None:
                assert partition.high_watermark <= partition.log.log_end_offset
                if partition.is_leader and partition.high_watermark > len(self.committed):
                    self._note_committed(partition)

    def _note_committed(self, partition: Partition) -> None:
        for offset, value in contents(partition, len(self.committed), partition.high_watermark):
            assert self.committed.setdefault(offset, value) == value, f"two values at {offset}"

    def settle(self) -> None:
        """Heal everything, let it come to rest, and see that all is where it should be."""
        self.lossy, self.cut_off, self.ambush = 0.0, set(), False
        for node_id in self.houses:
            self.revive(node_id)
        self.run(8_000)
        leader = self.houses[self.registration.leader].partition()
        assert leader is not None and leader.is_leader, self.registration
        assert set(self.registration.isr) == set(self.houses), "everybody comes back into sync"
        assert leader.high_watermark == leader.log.log_end_offset
        values = dict(contents(leader, 0, leader.log.log_end_offset))
        for offset, value in {**self.committed, **self.acked}.items():
            assert values.get(offset) == value, f"lost {value!r} at {offset}"
        for house in self.houses.values():
            partition = house.partition()
            assert partition is not None
            assert dict(contents(partition, 0, partition.log.log_end_offset)) == values, "replicas differ"


def contents(partition: Partition, start: int, end: int) -> list[tuple[int, bytes]]:
    """Offsets and values of a log between two offsets."""
    data = partition.log.read(start, 10_000_000, max_offset=end).read() if start < end else b""
    found = []
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position + 8 : position + 12], "big") + 12
        batch = data[position : position + size]
        found += [(r.offset, r.value or b"") for r in iter_records(batch) if start <= r.offset < end]
        position += size
    return found


def _copied(answer: FetchReply) -> FetchReply:
    """A reply as it leaves: the bytes, not ranges of files that may change while it is on its way."""
    topics = []
    for topic_id, results in answer.topics:
        copies = []
        for result in results:
            if result.size:
                data = b"".join([part.read() for part in result.ranges])  # type: ignore[attr-defined]
                result = result._replace(ranges=(memoryview(data),))
            copies.append(result)
        topics.append((topic_id, copies))
    return answer._replace(topics=topics)
