"""Moving work from brokers that have too much to those that have least, by what they measured. Pure, and it says why.

A broker's burden is the largest of its measures, each as a share of what all brokers have of it on average: CPU,
memory, disk, network, messages. Invariants: a move goes from a broker above the average by more than the tolerance to
one below it, takes about as much as partitions there take on average, never makes the receiver the new worst, and
never puts two replicas of a partition on one rack that were on two; nothing is decided while a broker has not reported,
or replicas move already. Leadership goes before replicas: it costs nothing. Called by the server's controller.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from headrace.cluster.control_messages import BrokerLoad
from headrace.cluster.elections import leadership_of, record_of
from headrace.cluster.image import ClusterImage, TopicImage
from headrace.cluster.reassignment import is_moving, reassign
from headrace.cluster.records import MetadataRecord

MEASURES: dict[str, Callable[[BrokerLoad], float]] = {
    "CPU": lambda load: load.cpu,
    "network": lambda load: load.bytes_in + load.bytes_out,
    "message rate": lambda load: load.messages_in,
    "disk": lambda load: float(load.disk_bytes),
    "memory": lambda load: float(load.memory_bytes),
}
LEADERS_MEASURES = ("CPU", "network", "message rate")
"""What follows leadership; the rest goes with replicas."""
FLOOR = {"CPU": 0.05, "network": 100_000.0, "message rate": 100.0, "disk": 64e6, "memory": 64e6}
"""An average below this is too little to be worth a move."""


class Burden(NamedTuple):
    """How a broker stands: by which measure it is worst, and that as a multiple of the average."""

    broker: int
    measure: str
    value: float
    average: float

    @property
    def share(self) -> float:
        return self.value / self.average


class Move(NamedTuple):
    """One step, with the records that begin it and the reason."""

    topic: str
    index: int  # type: ignore[assignment]
    records: list[MetadataRecord]
    why: str


def burdens(loads: Mapping[int, BrokerLoad]) -> list[Burden]:
    """How each broker stands, worst first. Measures that are too small to matter do not count."""
    found: list[Burden] = []
    for broker, load in loads.items():
        worst = Burden(broker, "CPU", 0.0, 1.0)
        for measure, of in MEASURES.items():
            average = sum(of(each) for each in loads.values()) / len(loads)
            if average >= FLOOR[measure]:
                worst = max(worst, Burden(broker, measure, of(load), average), key=lambda each: each.share)
        found.append(worst)
    return sorted(found, key=lambda each: (-each.share, each.broker))


def next_move(image: ClusterImage, loads: Mapping[int, BrokerLoad | None], tolerance: float) -> Move | None:
    """The move that helps most, if there is one worth it. `tolerance` is a share of the average: 0.2 bears 20 %."""
    alive = [broker.id for broker in image.brokers.values() if broker.may_lead]
    known = {broker: load for broker in alive if (load := loads.get(broker)) is not None}
    if len(known) < len(alive) or len(known) < 2 or _moves_already(image):
        return None
    ranked = burdens(known)
    worst = ranked[0]
    if worst.share <= 1 + tolerance:
        return None
    of = MEASURES[worst.measure]
    receivers = sorted(
        (broker for broker in known if broker != worst.broker and of(known[broker]) < worst.average),
        key=lambda broker: (of(known[broker]), broker),
    )
    load = known[worst.broker]
    by_leaders = worst.measure in LEADERS_MEASURES
    count = load.leaders if by_leaders else load.partitions
    part = worst.value / max(1, count)
    for receiver in receivers:
        if of(known[receiver]) + part >= worst.value:
            continue  # it would be no better off than the giver is now
        why = _why(worst, receiver, of(known[receiver]), part)
        if by_leaders and (move := _hand_leadership(image, worst.broker, receiver, why)) is not None:
            return move
        if (move := _hand_replica(image, worst.broker, receiver, by_leaders, why)) is not None:
            return move
    return None


def _moves_already(image: ClusterImage) -> bool:
    return any(is_moving(each) for topic in image.topics.values() for each in topic.partitions)


def _why(worst: Burden, receiver: int, has: float, part: float) -> str:
    return (
        f"broker {worst.broker} has {worst.share:.1f} times the average of {worst.measure} "
        f"({_amount(worst.value)} against {_amount(worst.average)}), broker {receiver} has {_amount(has)}; "
        f"this takes about {_amount(part)}"
    )


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _led_by(image: ClusterImage, broker: int) -> Iterator[tuple[TopicImage, int]]:
    for topic in image.topics.values():
        for index, registration in enumerate(topic.partitions):
            if registration.leader == broker:
                yield topic, index


def _hand_leadership(image: ClusterImage, giver: int, receiver: int, why: str) -> Move | None:
    """Let an in-sync follower lead, and be preferred from now on, so that it stays so."""
    if not leadership_of(image)(receiver):
        return None
    for topic, index in _led_by(image, giver):
        now = topic.partitions[index]
        if receiver in now.isr:
            replicas = (receiver, *[each for each in now.replicas if each != receiver])
            record = record_of(topic, index, now._replace(replicas=replicas, leader=receiver))
            assert record is not None
            return Move(topic.name, index, [record], f"{topic.name}-{index} is led by {receiver}: {why}")
    return None


def _hand_replica(image: ClusterImage, giver: int, receiver: int, leading: bool, why: str) -> Move | None:
    racks = {broker.id: broker.rack for broker in image.brokers.values()}
    for topic in image.topics.values():
        for index, now in enumerate(topic.partitions):
            if giver not in now.replicas or receiver in now.replicas or (leading and now.leader != giver):
                continue
            others = {racks.get(each) for each in now.replicas if each != giver}
            if racks[receiver] is not None and racks[receiver] in others and racks.get(giver) not in others:
                continue
            target = [receiver if each == giver else each for each in now.replicas]
            record = reassign(image, topic, index, target)
            if record is not None:
                words = f"{topic.name}-{index} goes from {giver} to {receiver}: {why}"
                return Move(topic.name, index, [record], words)
    return None
