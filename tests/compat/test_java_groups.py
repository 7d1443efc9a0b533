"""Groups of Kafka's own Java consumers, of both protocols, alone and among others. Skipped without the tools."""

import re
from collections.abc import Iterator

import pytest

from headrace.testing import Broker
from tests.compat.group_clients import Confluent, ConfluentConsumer, KafkaPython, Member, wait_until
from tests.compat.java_tools import WITH_TOOLS, Java, JavaConsumer, run_tool
from tests.compat.test_groups import ALL, PARTITIONS, QUICK, committed, new_group, topic_with

pytestmark = WITH_TOOLS

ROUND_ROBIN = {"assignment-strategy": "org.apache.kafka.clients.consumer.RoundRobinAssignor"}
COOPERATIVE = {"assignment-strategy": "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(data_dir=tmp_path_factory.mktemp("java-groups"), settings=QUICK) as broker:
        yield broker


def share(*members: Member) -> bool:
    held = [index for member in members for index in member.held]
    return sorted(held) == sorted(ALL) and all(member.held for member in members)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        (Java, {}),
        (Java, ROUND_ROBIN),
        (Java, COOPERATIVE),
        (JavaConsumer, {}),
        (JavaConsumer, {"group-remote-assignor": "range"}),
    ],
    ids=["range", "roundrobin", "cooperative", "consumer", "consumer-range"],
)
def test_two_verifiable_consumers_share_and_one_takes_over(
    family: type[Java], config: dict[str, str], quick: Broker
) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    with family(quick.bootstrap, group, topic, **config) as first:
        wait_until(lambda: first.held == ALL, "the only member holds all", first)
        second = family(quick.bootstrap, group, topic, **config)
        with second:
            wait_until(lambda: share(first, second), "two members share", first, second)
        wait_until(lambda: first.held == ALL, "the one that is left holds all", first)
        wait_until(lambda: len(set(first.seen + second.seen)) == 40, "every record is read", first)
    assert committed(quick.bootstrap, group, topic) == [10] * PARTITIONS


def test_a_group_of_three_families_shares(quick: Broker) -> None:
    from kafka.coordinator.assignors.range import RangePartitionAssignor

    topic, group = topic_with(quick.bootstrap, 40), new_group()
    members: list[Member] = [
        Java(quick.bootstrap, group, topic),
        Confluent(quick.bootstrap, group, topic, **{"partition.assignment.strategy": "range"}),
        KafkaPython(quick.bootstrap, group, topic, partition_assignment_strategy=(RangePartitionAssignor,)),
    ]
    with members[0], members[1], members[2]:
        wait_until(lambda: share(*members), "three families share", *members)
        wait_until(
            lambda: len({each for member in members for each in member.seen}) == 40, "all is read", *members
        )


def test_both_protocols_of_two_families_share_a_group(quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()
    members: list[Member] = [
        Java(quick.bootstrap, group, topic),
        JavaConsumer(quick.bootstrap, group, topic),
        ConfluentConsumer(quick.bootstrap, group, topic),
    ]
    with members[0]:
        wait_until(lambda: members[0].held == ALL, "the classic member holds all", members[0])
        with members[1], members[2]:
            wait_until(lambda: share(*members), "both protocols share", *members)
        wait_until(lambda: members[0].held == ALL, "the classic member holds all again", members[0])


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_console_consumer_reads_as_a_group_and_goes_on(protocol: str, quick: Broker) -> None:
    topic, group = topic_with(quick.bootstrap, 40), new_group()

    def read(count: int) -> list[str]:
        return run_tool(
            "kafka-console-consumer",
            *("--bootstrap-server", quick.bootstrap, "--topic", topic, "--group", group, "--from-beginning"),
            *("--max-messages", str(count), "--timeout-ms", "60000"),
            *("--command-property", f"group.protocol={protocol}"),
        ).split()

    assert sorted(map(int, read(25) + read(15))) == list(range(40))
    described = run_tool(
        "kafka-consumer-groups", "--bootstrap-server", quick.bootstrap, "--describe", "--group", group
    )
    rows = re.findall(rf"^{group}\s+{topic}\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", described, re.M)
    assert sorted(rows) == [(str(index), "10", "10", "0") for index in range(PARTITIONS)]
