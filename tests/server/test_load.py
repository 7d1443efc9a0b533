"""What a broker reports of its load: as a whole, and of the partitions that most of it comes from."""

import asyncio

from headrace.base.clock import ManualClock
from headrace.cluster.control_messages import BrokerLoad, PartitionLoad
from headrace.server.load import HEAVIEST_MAX, LoadMeter, Traffic
from tests.server.members import HOST, Cluster, Node, until, with_cluster
from tests.server.raw import RawClient, batch, fetch_body

SPAN_S = 2.0
RECORDS = batch(b"x" * 1_000, b"y" * 1_000)


class Meter:
    """The meter of a node, by a clock of its own."""

    def __init__(self, node: Node) -> None:
        self.clock = ManualClock()
        assert node.broker.peers is not None
        self.meter = LoadMeter(node.broker, Traffic(), node.broker.peers, self.clock)
        self.measure()

    def measure(self) -> BrokerLoad:
        self.clock.advance(SPAN_S * 1000)
        return self.meter.measure()


def part(load: BrokerLoad, topic: str, index: int = 0) -> PartitionLoad | None:
    return next((each for each in load.heaviest if (each.topic, each.index) == (topic, index)), None)


def test_a_report_tells_what_a_partition_takes_and_gives_to_followers_and_consumers() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2]])
        await until(
            lambda: all("t" in cluster.nodes[number].image.topics for number in (1, 2)), "for the topic"
        )
        leader, follower = Meter(cluster.nodes[1]), Meter(cluster.nodes[2])
        port = cluster.nodes[1].process.port
        replica = cluster.nodes[2].broker.replicas.table.get("t", 0)
        with RawClient(HOST, port) as client:
            answer = await asyncio.to_thread(client.produce, "t", RECORDS)
            assert answer.error_code == 0
            await until(lambda: replica.log.log_end_offset == 2, "for the follower")
            rate = len(RECORDS) / SPAN_S
            assert part(leader.measure(), "t") == PartitionLoad("t", 0, len(RECORDS), rate, rate, 2 / SPAN_S)
            assert part(follower.measure(), "t") == PartitionLoad("t", 0, len(RECORDS)), "it only follows"

            await asyncio.to_thread(client.fetch, fetch_body("t", {0: 0}))
            assert part(leader.measure(), "t") == PartitionLoad("t", 0, len(RECORDS), 0.0, rate)
            assert part(leader.measure(), "t") == PartitionLoad("t", 0, len(RECORDS))

    with_cluster(scenario)


def test_a_fetch_that_waits_for_more_counts_what_it_is_sent_once() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1]])
        node = cluster.nodes[1]
        await until(lambda: "t" in node.image.topics, "for the topic")
        meter = Meter(node)
        with RawClient(HOST, node.process.port) as reader, RawClient(HOST, node.process.port) as writer:
            patient = fetch_body("t", {0: 0}, min_bytes=3 * len(RECORDS), max_wait_ms=60_000)
            reading = asyncio.create_task(asyncio.to_thread(reader.fetch, patient))
            partition = node.broker.replicas.table.get("t", 0)
            await until(lambda: bool(partition._readers), "for the fetch to wait")
            for _ in range(3):
                await asyncio.to_thread(writer.produce, "t", RECORDS)
            await reading
        found = part(meter.measure(), "t")
        assert found is not None
        assert found.bytes_out * SPAN_S == 3 * len(RECORDS)

    with_cluster(scenario)


def test_a_report_names_only_the_heaviest_partitions() -> None:
    async def scenario(cluster: Cluster) -> None:
        count = HEAVIEST_MAX + 4
        await cluster.create("t", [[1]] * count)
        node = cluster.nodes[1]
        await until(lambda: "t" in node.image.topics, "for the topic")
        meter = Meter(node)
        with RawClient(HOST, node.process.port) as client:
            for index in range(count):
                await asyncio.to_thread(client.produce, "t", batch(b"x" * 100 * (index + 1)), index)
        load = meter.measure()
        named = [each.index for each in load.heaviest if each.bytes_in and each.size_bytes]
        assert len(load.heaviest) <= 3 * HEAVIEST_MAX
        assert set(range(4, count)) <= set(named), "all but the four lightest"
        assert load.leaders >= count
        assert load.messages_in * SPAN_S == count

    with_cluster(scenario)
