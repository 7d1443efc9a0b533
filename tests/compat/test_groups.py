"""Groups of foreign consumers share a topic, go on where they left off, and survive the broker's restarts and kills."""

import json
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator

import pytest

from headrace.testing import Broker
from tests.compat.clients import produce_confluent
from tests.compat.group_clients import MEMBERS, Confluent, ConfluentConsumer, Member, wait_until
from tests.compat.samples import QUIET, WAIT_S, Sample

MakeTopic = Callable[..., str]
PARTITIONS = 4
ALL = set(range(PARTITIONS))
QUICK = {
    "group.initial.rebalance.delay.ms": 0,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.consumer.heartbeat.interval.ms": 200,
}
FAMILIES: dict[str, type[Member]] = {**MEMBERS, "confluent-consumer": ConfluentConsumer}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker on disk whose first rebalances do not wait for more members."""
    data = tmp_path_factory.mktemp("groups")
    with Broker(data_dir=data, settings=QUICK) as broker:
        yield broker


def new_group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


def topic_with(bootstrap: str, count: int, partitions: int = PARTITIONS) -> str:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"shared-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(WAIT_S)
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(name, str(number), partition=number % partitions)
    assert producer.flush(WAIT_S) == 0
    return name


def committed(bootstrap: str, group: str, topic: str, partitions: int = PARTITIONS) -> list[int]:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": group})
    try:
        asked = [TopicPartition(topic, index) for index in range(partitions)]
        return [each.offset for each in consumer.committed(asked, timeout=WAIT_S)]
    finally:
        consumer.close()


ASSIGNORS = [
    ("confluent", {"partition.assignment.strategy": "range"}),
    ("confluent", {"partition.assignment.strategy": "roundrobin"}),
    ("confluent", {"partition.assignment.strategy": "cooperative-sticky"}),
    ("confluent-consumer", {}),
    ("confluent-consumer", {"group.remote.assignor": "range"}),
    ("kafka-python", {}),
    ("aiokafka", {}),
]


BOTH = pytest.mark.parametrize("family", [Confluent, ConfluentConsumer], ids=["classic", "consumer"])


@pytest.mark.parametrize(("client", "config"), ASSIGNORS)
def test_two_members_share_the_partitions_and_one_takes_over(
    client: str, config: dict[str, str], quick: Broker
) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    with FAMILIES[client](quick.bootstrap, group, topic, **config) as first:
        wait_until(lambda: first.held == ALL, "the only member holds all", first)
        second = FAMILIES[client](quick.bootstrap, group, topic, **config)
        with second:
            wait_until(
                lambda: len(first.held) == len(second.held) == 2 and first.held | second.held == ALL,
                "two members share",
                first,
                second,
            )
        wait_until(lambda: first.held == ALL, "the one that is left holds all", first)
        wait_until(lambda: len(set(first.seen + second.seen)) == 40, "every record is read", first)


def test_members_of_different_families_share_a_group(quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 60, partitions=6), new_group()
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AiokafkaRange
    from kafka.coordinator.assignors.range import RangePartitionAssignor as KafkaPythonRange

    config: dict[str, dict[str, object]] = {
        "confluent": {"partition.assignment.strategy": "range"},
        "kafka-python": {"partition_assignment_strategy": (KafkaPythonRange,)},
        "aiokafka": {"partition_assignment_strategy": (AiokafkaRange,)},
    }
    members: list[Member] = [MEMBERS[name](quick.bootstrap, group, topic, **config[name]) for name in MEMBERS]
    with members[0], members[1], members[2]:
        wait_until(
            lambda: (
                sorted(len(member.held) for member in members) == [2, 2, 2]
                and set().union(*[member.held for member in members]) == set(range(6))
            ),
            "three families share",
            *members,
        )
        wait_until(
            lambda: len({each for member in members for each in member.seen}) == 60, "all is read", *members
        )


@pytest.mark.parametrize("client", FAMILIES)
@pytest.mark.parametrize("kill", [False, True], ids=["restart", "kill"])
def test_a_group_goes_on_after_the_broker_comes_back(client: str, kill: bool, quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    with FAMILIES[client](quick.bootstrap, group, topic) as before:
        wait_until(lambda: len(set(before.seen)) == 40, "the first half is read", before)
    assert committed(quick.bootstrap, group, topic) == [10] * PARTITIONS
    if kill:
        quick.kill()
        quick.start()
    else:
        quick.restart()
    assert committed(quick.bootstrap, group, topic) == [10] * PARTITIONS
    samples = [Sample(None, b"later")] * 5
    produce_confluent(quick.bootstrap, topic, samples, 0)
    with FAMILIES[client](quick.bootstrap, group, topic) as after:
        wait_until(lambda: len(after.seen) == 5, "the rest is read", after)
        assert after.seen == [(0, offset) for offset in range(10, 15)]


@BOTH
def test_a_member_stays_through_a_kill_of_the_broker(quick: Broker, family: type[Member]) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    with family(quick.bootstrap, group, topic) as member:
        wait_until(lambda: len(set(member.seen)) == 40, "all is read", member)
        quick.kill()
        quick.start()
        produce_confluent(quick.bootstrap, topic, [Sample(None, b"later")] * 5, 0)
        wait_until(lambda: len(set(member.seen)) == 45, "what came later is read too", member)
    assert committed(quick.bootstrap, group, topic) == [15, 10, 10, 10]


@BOTH
def test_a_static_member_restarts_without_a_rebalance(quick: Broker, family: type[Member]) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    with family(quick.bootstrap, group, topic, **{"group.instance.id": "other"}) as other:
        first = family(quick.bootstrap, group, topic, **{"group.instance.id": "one"})
        with first:
            wait_until(lambda: len(first.held) == len(other.held) == 2, "two share", first, other)
        held, others = first.held, other.held
        with family(quick.bootstrap, group, topic, **{"group.instance.id": "one"}) as again:
            wait_until(lambda: again.held == held, "it has its partitions back", again, other)
            assert other.held == others


def test_a_group_changes_its_protocol_member_by_member_and_back(quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()

    def share(*members: Member) -> bool:
        held = [index for member in members for index in member.held]
        return sorted(held) == sorted(ALL) and all(member.held for member in members)

    first = Confluent(quick.bootstrap, group, topic)
    with first:
        wait_until(lambda: first.held == ALL, "a classic member holds all", first)
        second = ConfluentConsumer(quick.bootstrap, group, topic)
        with second:
            wait_until(lambda: share(first, second), "both protocols share", first, second)
        wait_until(lambda: first.held == ALL, "the classic member holds all again", first)
        wait_until(lambda: len(set(first.seen + second.seen)) == 40, "every record is read", first, second)
    assert committed(quick.bootstrap, group, topic) == [10] * PARTITIONS


@BOTH
def test_the_admin_sees_groups_and_deletes_them(quick: Broker, family: type[Member]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
    from confluent_kafka.admin import AdminClient

    topic, group = topic_with(quick.bootstrap, 40), new_group()
    admin = AdminClient({**QUIET, "bootstrap.servers": quick.bootstrap})
    with family(quick.bootstrap, group, topic, **{"client.id": "reader"}) as member:
        wait_until(lambda: len(set(member.seen)) == 40, "all is read", member)
        described = admin.describe_consumer_groups([group])[group].result(WAIT_S)
        assignor = "range" if family is Confluent else "uniform"
        assert (described.state.name, described.partition_assignor) == ("STABLE", assignor)
        [one] = described.members
        assert one.client_id == "reader"
        assert {each.partition for each in one.assignment.topic_partitions} == ALL
        with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([group])[group].result(WAIT_S)
    listed = {each.group_id: each.state.name for each in admin.list_consumer_groups().result(WAIT_S).valid}
    assert listed[group] == "EMPTY"
    [offsets] = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    assert {each.partition: each.offset for each in offsets.result(WAIT_S).topic_partitions} == dict.fromkeys(
        ALL, 10
    )
    admin.delete_consumer_groups([group])[group].result(WAIT_S)
    assert group not in {each.group_id for each in admin.list_consumer_groups().result(WAIT_S).valid}
    assert committed(quick.bootstrap, group, topic) == [-1001] * PARTITIONS


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (Debian: apt install kcat)")
def test_kcat_reads_as_a_group_and_goes_on(quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()

    command = ["kcat", "-b", quick.bootstrap, "-G", group, "-X", "auto.offset.reset=earliest", "-q", "-J"]

    def read(count: int) -> list[dict[str, object]]:
        done = subprocess.run(
            [*command, "-c", str(count), topic],
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return [json.loads(line) for line in done.stdout.decode().splitlines()]

    first, second = read(25), read(15)
    seen = {(each["partition"], each["offset"]) for each in first + second}
    assert seen == {(partition, offset) for partition in ALL for offset in range(10)}
