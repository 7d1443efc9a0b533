"""Moving work from brokers that have too much to those that have least, by what they measured. Pure, and it says why.

A broker's burdens are its measures, each as a multiple of what brokers have of it on average: CPU, network, messages,
disk. Memory is none: it does not go with partitions. What is moved is chosen by what that very partition carries, as
its broker reported it; what is not among the heaviest few of its broker is not moved.

**Why it settles.** A move takes from the giver at most half of what it has more than the receiver, so that the larger
of the two gets smaller and they do not change places; and in no other measure does it bring the receiver to where the
giver was. So, as long as the load stays as it is, the list of all burdens, largest first, gets smaller with each move,
and no arrangement comes twice. Loads do change, and a measurement is of a moment only: so a partition that was moved
rests for some looks, and does not go back to where it came from for many more. CPU is not known by partition. It is
taken to go with traffic, and is a reason for a move only between brokers whose traffic differs too: a process that is
busy with something else is not helped by taking partitions from it.

Further invariants: a move goes from a broker above the average by more than the tolerance to one below it, and never
puts two replicas of a partition on one rack that were on two; nothing is decided while a broker has not reported, or
replicas move, or have moved since the last look. Leadership goes before replicas: it costs nothing. Called by the
server's controller, which begins with a new `Balancer` each time it becomes the active one.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from headrace.cluster.control_messages import BrokerLoad, PartitionLoad
from headrace.cluster.elections import record_of
from headrace.cluster.image import ClusterImage, PartitionRegistration, TopicImage
from headrace.cluster.reassignment import is_moving, reassign
from headrace.cluster.records import MetadataRecord

CPU, NETWORK, MESSAGES, DISK = "CPU", "network", "message rate", "disk"
MEASURES: dict[str, Callable[[BrokerLoad], float]] = {
    CPU: lambda load: load.cpu,
    NETWORK: lambda load: load.bytes_in + load.bytes_out,
    MESSAGES: lambda load: load.messages_in,
    DISK: lambda load: float(load.disk_bytes),
}
UNITS = {CPU: "cores", NETWORK: "bytes a second", MESSAGES: "messages a second", DISK: "bytes"}
FLOOR = {CPU: 0.05, NETWORK: 100_000.0, MESSAGES: 100.0, DISK: 64e6}
"""An average below this is too little to be worth a move."""
WORTH = 0.001
"""The share of what a broker has above the average that a move must take at least: less would take a thousand moves."""
REST_LOOKS = 10
"""For how many looks a partition that was moved stays where it is."""
BACK_LOOKS = 100
"""For how many looks it does not go back to where it came from."""

Key: TypeAlias = tuple[str, int]
"""Topic and index of a partition."""
MayGo: TypeAlias = Callable[[Key, int], bool]
"""Whether a partition may go to a broker, by what was moved before."""


class Burden(NamedTuple):
    """How a broker stands by one measure."""

    broker: int
    measure: str
    value: float
    average: float

    @property
    def share(self) -> float:
        """As a multiple of the average."""
        return self.value / self.average


class Move(NamedTuple):
    """One step, with the records that begin it and the reason."""

    key: Key
    giver: int
    receiver: int
    records: list[MetadataRecord]
    why: str


class _Past(NamedTuple):
    """A move that was made."""

    look: int
    key: Key
    giver: int


class Balancer:
    """Looks at the cluster every now and then, and remembers what it moved."""

    def __init__(self) -> None:
        self._look = 0
        self._past: deque[_Past] = deque()
        self._moved_before = False

    def look(
        self,
        image: ClusterImage,
        loads: Mapping[int, BrokerLoad | None],
        tolerance: float,
        excluded: Collection[int] = (),
    ) -> Move | None:
        """The move to make now, if there is one. `tolerance` is a share of the average: 0.2 bears 20 %.

        Brokers that are `excluded` have no part in it: one that was drained holds as little as one that is new, and
        only who drained it knows that it is to stay so.
        """
        self._look += 1
        moved_before, self._moved_before = self._moved_before, _moves_already(image)
        if moved_before or self._moved_before:
            return None  # what was just measured is partly of before
        while self._past and self._look - self._past[0].look > BACK_LOOKS:
            self._past.popleft()
        move = next_move(image, loads, tolerance, excluded, self._may_go)
        if move is not None:
            self._past.append(_Past(self._look, move.key, move.giver))
        return move

    def _may_go(self, key: Key, receiver: int) -> bool:
        rests_since = self._look - REST_LOOKS
        return not any(
            past.key == key and (past.look >= rests_since or past.giver == receiver) for past in self._past
        )


def burdens(loads: Mapping[int, BrokerLoad]) -> list[Burden]:
    """How brokers stand by each measure, worst first. Measures that are too small to matter do not count."""
    found: list[Burden] = []
    for measure, of in MEASURES.items():
        average = sum(of(load) for load in loads.values()) / len(loads)
        if average >= FLOOR[measure]:
            found += [Burden(broker, measure, of(load), average) for broker, load in loads.items()]
    return sorted(found, key=lambda each: (-each.share, each.broker))


def next_move(
    image: ClusterImage,
    loads: Mapping[int, BrokerLoad | None],
    tolerance: float,
    excluded: Collection[int] = (),
    may_go: MayGo = lambda key, receiver: True,
) -> Move | None:
    """The move that helps the worst off who can be helped."""
    alive = [broker.id for broker in image.brokers.values() if broker.may_lead and broker.id not in excluded]
    known = {broker: load for broker in alive if (load := loads.get(broker)) is not None}
    if len(known) < len(alive) or len(known) < 2:
        return None
    ranked = burdens(known)
    for worst in ranked:
        if worst.share <= 1 + tolerance:
            return None
        if (move := _Relief(image, known, ranked, worst, may_go).move()) is not None:
            return move
    return None


def _moves_already(image: ClusterImage) -> bool:
    return any(is_moving(each) for topic in image.topics.values() for each in topic.partitions)


class _Relief:
    """What can be taken from one broker that has too much of something."""

    def __init__(
        self,
        image: ClusterImage,
        loads: Mapping[int, BrokerLoad],
        ranked: Sequence[Burden],
        worst: Burden,
        may_go: MayGo,
    ) -> None:
        self._image = image
        self._loads = loads
        self._averages = {each.measure: each.average for each in ranked}
        self._shares = {each.broker: each.share for each in reversed(ranked)}  # by what each is worst off
        self._produced = {
            (part.topic, part.index): part.bytes_in
            for load in loads.values()
            for part in load.heaviest
            if part.bytes_in
        }
        self._worst = worst
        self._may_go = may_go

    def move(self) -> Move | None:
        worst, of = self._worst, MEASURES[self._worst.measure]
        receivers = sorted(
            (broker for broker, load in self._loads.items() if of(load) < worst.average),
            key=lambda broker: (of(self._loads[broker]), self._shares[broker], broker),
        )
        if worst.measure != DISK:  # the rest goes with leadership
            for receiver in receivers:
                if (move := self._hand_leadership(receiver)) is not None:
                    return move
        for receiver in receivers:
            if (move := self._hand_replica(receiver)) is not None:
                return move
        return None

    def _hand_leadership(self, receiver: int) -> Move | None:
        """Let an in-sync follower lead, and be preferred from now on, so that it stays so."""
        for part, takes in self._fitting(receiver, replica=False):
            topic, now = self._find(part)
            if now.leader != self._worst.broker or receiver not in now.isr:
                continue
            replicas = (receiver, *[each for each in now.replicas if each != receiver])
            record = record_of(topic, part.index, now._replace(replicas=replicas, leader=receiver))
            assert record is not None
            return self._explained(part, receiver, record, f"is led by {receiver}", takes)
        return None

    def _hand_replica(self, receiver: int) -> Move | None:
        giver, free_bytes = self._worst.broker, self._loads[receiver].disk_free_bytes
        for part, takes in self._fitting(receiver, replica=True):
            topic, now = self._find(part)
            if giver not in now.replicas or receiver in now.replicas:
                continue
            leads = now.leader == giver
            if not leads and self._worst.measure != DISK:
                continue
            if 0 <= free_bytes <= part.size_bytes or not self._keeps_racks(now, receiver):
                continue
            target = [receiver if each == giver else each for each in now.replicas]
            if leads:  # what leads here is to lead there, or its traffic would go to somebody else
                target.remove(receiver)
                target.insert(0, receiver)
            record = reassign(self._image, topic, part.index, target)
            if record is not None:
                return self._explained(part, receiver, record, f"goes from {giver} to {receiver}", takes)
        return None

    def _find(self, part: PartitionLoad) -> tuple[TopicImage, PartitionRegistration]:
        topic = self._image.topics[part.topic]
        return topic, topic.partitions[part.index]

    def _keeps_racks(self, now: PartitionRegistration, receiver: int) -> bool:
        racks = {broker.id: broker.rack for broker in self._image.brokers.values()}
        others = {racks.get(each) for each in now.replicas if each != self._worst.broker}
        return (
            racks[receiver] is None
            or racks[receiver] not in others
            or racks.get(self._worst.broker) in others
        )

    def _fitting(self, receiver: int, *, replica: bool) -> Iterator[tuple[PartitionLoad, float]]:
        """The reported partitions that a move to this receiver may take, the one that helps most first."""
        worst, measure = self._worst, self._worst.measure
        giver, has = self._loads[worst.broker], self._loads[receiver]
        least = (worst.value - worst.average) * WORTH
        found: list[tuple[PartitionLoad, float]] = []
        for part in giver.heaviest:
            topic = self._image.topics.get(part.topic)
            if topic is None or part.index >= len(topic.partitions):
                continue  # a report may be of one that is gone
            takes = self._taken(part, replica)
            halved = [measure, NETWORK] if measure == CPU else [measure]
            if takes[measure] >= least and all(
                takes[each] <= (MEASURES[each](giver) - MEASURES[each](has)) / 2 for each in halved
            ):
                others = (each for each in self._averages if each != measure)
                if all(self._stays_below(has, each, takes[each]) for each in others):
                    found.append((part, takes[measure]))
        found.sort(key=lambda each: -each[1])
        return (each for each in found if self._may_go((each[0].topic, each[0].index), receiver))

    def _taken(self, part: PartitionLoad, replica: bool) -> dict[str, float]:
        """What goes with a partition's leadership, or with its replica.

        Whoever holds it gets what is produced to it, from producers or as a follower: that goes only with the replica.
        """
        giver = self._loads[self._worst.broker]
        received = self._produced.get((part.topic, part.index), 0.0)
        network = part.bytes_out + (received if replica else 0.0)
        traffic = MEASURES[NETWORK](giver)
        return {
            CPU: giver.cpu * min(1.0, network / traffic) if traffic else 0.0,
            NETWORK: network,
            MESSAGES: part.messages_in,
            DISK: float(part.size_bytes) if replica else 0.0,
        }

    def _stays_below(self, has: BrokerLoad, measure: str, more: float) -> bool:
        """Whether a receiver is then still better off than the giver is now."""
        return not more or (MEASURES[measure](has) + more) / self._averages[measure] < self._worst.share

    def _explained(
        self, part: PartitionLoad, receiver: int, record: MetadataRecord, what: str, takes: float
    ) -> Move:
        worst = self._worst
        has = MEASURES[worst.measure](self._loads[receiver])
        why = (
            f"{part.topic}-{part.index} {what}: broker {worst.broker} has {worst.share:.1f} times the average of "
            f"{worst.measure} ({_amount(worst.value)} against {_amount(worst.average)} {UNITS[worst.measure]}), "
            f"broker {receiver} has {_amount(has)}; this takes {_amount(takes)}, which leaves them with about "
            f"{_amount(worst.value - takes)} and {_amount(has + takes)}"
        )
        return Move((part.topic, part.index), worst.broker, receiver, [record], why)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.2f}"
