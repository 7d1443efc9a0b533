"""What nodes of a cluster do for each other: read-your-writes, fencing, moving, leaving, and what they refuse."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace import Consumer, Producer, TopicPartition
from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.control_messages import BrokerLoad, PartitionLoad
from headrace.cluster.image import NO_LEADER
from headrace.cluster.reassignment import is_moving
from headrace.records.builder import build_batch
from headrace.server import broker as broker_module
from headrace.server.addresses import CannotServe
from headrace.storage.manager import LogManager, Wanted
from headrace.wire.apis import Api
from headrace.wire.headers import encode_request_header
from headrace.wire.messages import decode_response, encode_request
from tests.server.members import Cluster, Node, until, with_cluster

DAY_MS = 86_400_000


def test_a_change_is_seen_where_it_was_asked_for_and_then_everywhere() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = await cluster.other()
        body = {"topics": [{"name": "t", "num_partitions": 4, "replication_factor": 3}], "timeout_ms": 9_000}
        reply = await asked.ask(Api.CREATE_TOPICS, 7, body)
        assert reply.topics[0].error_code == 0
        assert len(asked.image.topics["t"].partitions) == 4, "whoever asked sees it at once"
        await until(lambda: all("t" in node.image.topics for node in cluster.alive))
        assert len({node.image.cluster_id for node in cluster.alive}) == 1
        blocks = await asyncio.gather(*[node.broker.producer_ids.next() for node in cluster.alive])
        assert len({first // 1000 for first in blocks}) == 3, "no two brokers give ids of one block"

    with_cluster(scenario)


def test_a_leader_that_is_gone_is_replaced_and_comes_back_in_sync() -> None:
    async def scenario(cluster: Cluster) -> None:
        active = await cluster.active()
        leader = await cluster.other()
        follower = await cluster.other(leader)
        await cluster.create("t", [[leader.id, follower.id, active.id]])
        await leader.die()
        await until(lambda: cluster.partition("t").leader == follower.id, "for another leader")
        now = cluster.partition("t")
        assert leader.id not in now.isr
        assert now.leader_epoch == 1
        assert active.image.brokers[leader.id].fenced
        told = await active.ask(Api.METADATA, 12, {"topics": None})
        assert leader.id in [broker.node_id for broker in told.brokers], "listed for a while"
        cluster.nodes[leader.id] = again = cluster.made(leader.id)
        await again.start()
        await until(lambda: leader.id in cluster.partition("t").isr, "for it to be in sync")
        assert cluster.partition("t").leader == follower.id

    with_cluster(scenario)


def test_another_controller_takes_over_when_the_active_one_is_gone() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = await cluster.active()
        others = [node for node in cluster.alive if node is not first]
        await cluster.create("t", [[first.id, *[node.id for node in others]]])
        await first.die()
        second = await cluster.active()
        assert second is not first
        await until(lambda: second.image.brokers[first.id].fenced, "for it to be fenced")
        await until(lambda: cluster.partition("t").leader in [node.id for node in others], "for a leader")
        await cluster.create("u", [[second.id]])

    with_cluster(scenario, brokers=4)


def test_a_broker_that_stops_hands_over_before_it_goes() -> None:
    async def scenario(cluster: Cluster) -> None:
        stopping = await cluster.other()
        follower = await cluster.other(stopping)
        await cluster.create("t", [[stopping.id, follower.id]])
        seen: list[int] = []
        follower.broker.metadata.watchers.append(
            lambda old, new: seen.append(new.topics["t"].partitions[0].leader)
        )
        await stopping.stop()
        await until(lambda: follower.image.brokers[stopping.id].fenced, "for it to be fenced")
        assert cluster.partition("t").leader == follower.id
        assert NO_LEADER not in seen, "there was a leader all the time"

    with_cluster(scenario)


def test_without_a_majority_changes_fail_clearly_and_the_rest_goes_on() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1], [2], [3]])
        left = await cluster.active()
        for node in cluster.alive:
            if node is not left:
                await node.die()
        await until(lambda: not left.is_active, "for it to notice")
        partition = left.broker.partition("t", left.id - 1)
        assert partition.index == left.id - 1, "it leads on"
        address = f"{left.options.host}:{left.options.port}"
        async with Producer({"bootstrap.servers": address, "enable.idempotence": False}) as producer:
            sent = await producer.send("t", b"written without a controller", partition=left.id - 1)
            assert (await sent).offset == 0
        async with Consumer({"bootstrap.servers": address, "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([TopicPartition("t", left.id - 1)])
            assert (await anext(consumer)).value == b"written without a controller"
        with pytest.raises(KafkaError) as failed:
            await left.ask(Api.CREATE_TOPICS, 7, {"topics": [{"name": "u"}], "timeout_ms": 500}, 500)
        assert failed.value.code is ErrorCode.REQUEST_TIMED_OUT
        assert "controller" in failed.value.message

    with_cluster(scenario)


async def produced(node: Node, index: int, records: bytes, acks: int, transactional_id: str | None) -> int:
    """The error that a produce to one partition of `t` is answered with."""
    topics = [{"name": "t", "partition_data": [{"index": index, "records": records}]}]
    body = {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout_ms": 1_000,
        "topic_data": topics,
    }
    reader, writer = await asyncio.open_connection(node.options.host, node.options.port)
    request = encode_request_header(Api.PRODUCE, 9, 1, "test") + encode_request(Api.PRODUCE, 9, body)
    writer.write(len(request).to_bytes(4, "big") + request)
    size = int.from_bytes(await reader.readexactly(4), "big")
    reply = decode_response(Api.PRODUCE, 9, (await reader.readexactly(size))[5:])
    writer.close()
    await writer.wait_closed()
    return int(reply.responses[0].partition_responses[0].error_code)


def test_a_leader_that_may_be_deposed_does_not_judge_sequences() -> None:
    async def sent(node: Node, sequence: int) -> int:
        records = build_batch([(0, None, b"x", ())], producer_id=77, producer_epoch=0, base_sequence=sequence)
        return await produced(node, node.id - 1, records, 1, None)

    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1], [2], [3]])
        left = await cluster.active()
        assert await sent(left, 0) == ErrorCode.NONE
        assert await sent(left, 9) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        for node in cluster.alive:
            if node is not left:
                await node.die()
        await until(lambda: left.broker.replication.is_in_doubt, "for heartbeats to be overdue")
        assert await sent(left, 9) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await sent(left, 1) == ErrorCode.NONE, "what fits is taken"

    with_cluster(scenario)


def test_what_a_coordinator_had_to_verify_is_checked_as_of_the_append() -> None:
    """The ISR may shrink, or the topic be made anew, while the coordinator is asked."""
    records = build_batch(
        [(0, None, b"x", ())], producer_id=77, producer_epoch=0, base_sequence=0, transactional=True
    )

    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.other()
        follower = await cluster.other(leader)
        await cluster.create("t", [[leader.id, follower.id]], min_insync_replicas="2")
        asked: list[Callable[[ErrorCode], None]] = []
        leader.broker.verifier.ask = lambda what, where, done: asked.append(done)  # type: ignore[method-assign]

        async def answered_after(change: Callable[[], Awaitable[object]]) -> int:
            asked.clear()
            waiting = asyncio.create_task(produced(leader, 0, records, -1, "txn"))
            await until(lambda: bool(asked), "for the coordinator to be asked")
            await change()
            asked[0](ErrorCode.NONE)
            return await waiting

        async def anew() -> None:
            before = leader.image.topics["t"].id
            await (await cluster.active()).ask(
                Api.DELETE_TOPICS, 6, {"topics": [{"name": "t"}], "timeout_ms": 9_000}
            )
            await cluster.create("t", [[leader.id, follower.id]], min_insync_replicas="2")
            await until(lambda: "t" in leader.image.topics and leader.image.topics["t"].id != before)

        async def alone() -> None:
            await follower.die()
            await until(lambda: leader.broker.partition("t", 0).isr == (leader.id,), "for the ISR to shrink")

        assert await answered_after(anew) == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert await answered_after(alone) == ErrorCode.NOT_ENOUGH_REPLICAS
        assert leader.broker.partition("t", 0).log.log_end_offset == 0

    with_cluster(scenario)


def test_replicas_move_to_other_brokers_and_what_is_impossible_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2]])
        asked = await cluster.other()

        async def move(replicas: list[int] | None) -> int:
            topics = [{"name": "t", "partitions": [{"partition_index": 0, "replicas": replicas}]}]
            reply = await asked.ask(Api.ALTER_PARTITION_REASSIGNMENTS, 1, {"topics": topics})
            return int(reply.responses[0].partitions[0].error_code)

        assert await move([1, 9]) == ErrorCode.INVALID_REPLICA_ASSIGNMENT
        assert await move(None) == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
        assert await move([3, 4]) == 0
        await until(lambda: not is_moving(cluster.partition("t")), "for the move to be done")
        now = cluster.partition("t")
        assert (now.replicas, sorted(now.isr), now.leader) == ((3, 4), [3, 4], 3)
        reply = await asked.ask(Api.LIST_PARTITION_REASSIGNMENTS, 0, {"topics": None})
        assert reply.topics == []

    with_cluster(scenario, brokers=4)


def test_leadership_goes_back_to_the_preferred_replica_when_it_is_asked_for() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = await cluster.other()
        first = await cluster.other(asked)
        await cluster.create("t", [[first.id, asked.id]])
        await first.die()
        await until(lambda: cluster.partition("t").leader == asked.id, "for another leader")
        cluster.nodes[first.id] = cluster.made(first.id)
        await cluster.nodes[first.id].start()
        await until(lambda: first.id in cluster.partition("t").isr, "for it to be in sync")
        reply = await asked.ask(Api.ELECT_LEADERS, 2, {"election_type": 0, "topic_partitions": None})
        [result] = reply.replica_election_results
        assert (result.topic, result.partition_result[0].error_code) == ("t", 0)
        assert cluster.partition("t").leader == first.id

    with_cluster(scenario)


def test_a_broker_that_is_gone_for_good_is_forgotten() -> None:
    async def scenario(cluster: Cluster) -> None:
        gone = cluster.nodes[4]
        await gone.die()
        active = await cluster.active()
        await until(lambda: active.image.brokers[4].fenced, "for it to be fenced")
        asked = await cluster.other()
        assert (await asked.ask(Api.UNREGISTER_BROKER, 0, {"broker_id": 4})).error_code == 0
        assert 4 not in asked.image.brokers
        reply = await asked.ask(Api.UNREGISTER_BROKER, 0, {"broker_id": 4})
        assert reply.error_code == ErrorCode.BROKER_ID_NOT_REGISTERED

    with_cluster(scenario, brokers=4)


def test_more_replicas_than_brokers_are_refused_with_the_number_there_is() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = await cluster.other()
        body = {"topics": [{"name": "t", "num_partitions": 1, "replication_factor": 4}], "timeout_ms": 9_000}
        [topic] = (await asked.ask(Api.CREATE_TOPICS, 7, body)).topics
        assert topic.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
        assert "only 3 broker(s) are registered" in topic.error_message

    with_cluster(scenario)


def test_loads_are_reported_and_the_balancer_hands_leadership_to_who_has_less_and_may() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2, 3]] * 4)
        active = await cluster.active()
        control = active.broker.member.controller.brokers
        await until(lambda: all(control.loads(active.broker.image).values()), "for reports")
        parts = tuple(PartitionLoad("t", index, 0, 1e6, 2e6) for index in range(4))
        busy = BrokerLoad(bytes_in=4e6, bytes_out=8e6, partitions=4, leaders=4, heaviest=parts)
        idle = BrokerLoad(partitions=4)
        cluster.nodes[1].process._registration.measure = lambda: busy  # type: ignore[union-attr]
        for number in (2, 3):
            cluster.nodes[number].process._registration.measure = lambda: idle  # type: ignore[union-attr]
        resource = {
            "resource_type": 4,
            "resource_name": "",
            "configs": [
                {"name": "balancer.enable", "config_operation": 0, "value": "true"},
                {"name": "balancer.interval.ms", "config_operation": 0, "value": "100"},
                {"name": "balancer.excluded.brokers", "config_operation": 0, "value": "2"},
            ],
        }
        body = {"resources": [resource]}
        assert (await active.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, body)).responses[0].error_code == 0
        await until(lambda: all(cluster.partition("t", i).leader == 3 for i in range(4)), "for all moves")

    with_cluster(scenario)


def test_settings_of_one_broker_are_changed_by_asking_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = await cluster.other()

        async def alter(number: int) -> int:
            config = {"name": "log.retention.ms", "config_operation": 0, "value": "60000"}
            resource = {"resource_type": 4, "resource_name": str(number), "configs": [config]}
            body = {"resources": [resource]}
            frame = encode_request_header(Api.INCREMENTAL_ALTER_CONFIGS, 1, 1, "test")
            frame += encode_request(Api.INCREMENTAL_ALTER_CONFIGS, 1, body)
            reply = await send(asked, frame)
            told = decode_response(Api.INCREMENTAL_ALTER_CONFIGS, 1, reply, 5)
            return int(told.responses[0].error_code)

        assert await alter(asked.id) == 0
        assert asked.image.config(4, str(asked.id)) == {"log.retention.ms": "60000"}

    with_cluster(scenario)


async def send(node: Node, frame: bytes) -> bytes:
    """A request to a node as a client sends it; the frame of the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.process.port)
    writer.write(len(frame).to_bytes(4, "big") + frame)
    size = int.from_bytes(await reader.readexactly(4), "big")
    reply = await reader.readexactly(size)
    writer.close()
    return reply


def test_a_clock_that_jumps_fences_nobody() -> None:
    async def scenario(cluster: Cluster) -> None:
        active = await cluster.active()
        other = await cluster.other()
        active.clock.jump_ms = DAY_MS
        other.clock.jump_ms = -DAY_MS
        beaten = other.broker.member.registration.heard_ms
        await until(lambda: other.broker.member.registration.heard_ms != beaten, "for a heartbeat")
        assert not any(broker.fenced for broker in active.image.brokers.values())
        assert active.is_active
        await cluster.create("t", [[1, 2, 3]])

    with_cluster(scenario)


def test_a_directory_of_another_cluster_or_node_is_refused(tmp_path: Path) -> None:
    async def refused(node: Node) -> str:
        with pytest.raises(CannotServe) as refusal:
            await node.start()
        await node.die()
        return str(refusal.value)

    async def scenario(cluster: Cluster) -> None:
        alone = Node(3, 0, {}, str(tmp_path / "alone"))
        await alone.start()
        await alone.stop()
        await cluster.nodes[3].die()
        here, elsewhere = cluster.nodes[1].image.cluster_id, "of-some-other-cluster-"
        words = await refused(cluster.made(3, str(tmp_path / "alone")))
        assert f"a cluster of its own, {alone.image.cluster_id}" in words
        words = await refused(Node(2, 0, {}, str(tmp_path / "alone")))
        assert "belongs to node 3, this is node 2" in words
        (tmp_path / "other").mkdir()
        identity = f"version=1\nnode.id=3\ndirectory.id=x\ncluster.id={elsewhere}\n"
        (tmp_path / "other" / "meta.properties").write_text(identity)
        words = await refused(cluster.made(3, str(tmp_path / "other")))
        assert f"belongs to cluster {elsewhere}, this is {here}" in words
        assert (await cluster.active()).image.cluster_id == here

    with_cluster(scenario)


def test_a_broker_that_opens_its_logs_is_heard_of_and_not_in_service_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("alone", [[3]])
        await cluster.create("deleted", [[3]])
        options = cluster.nodes[3].options
        async with Producer({"bootstrap.servers": f"{options.host}:{options.port}"}) as producer:
            await (await producer.send("deleted", b"a record, so that there are files"))
        await cluster.nodes[3].stop()
        opened = asyncio.Event()
        loading = LogManager.loading

        def slow(logs: LogManager, wanted: list[Wanted]) -> Iterator[None]:
            while not opened.is_set():
                yield
            yield from loading(logs, wanted)

        monkeypatch.setattr(LogManager, "loading", slow)
        again = cluster.nodes[3] = cluster.made(3)
        starting = asyncio.ensure_future(again.start())
        active = await cluster.active()
        await until(lambda: again.process._registration is not None, "for a registration")
        registration = again.process._registration
        assert registration is not None
        await until(lambda: registration.heard_ms is not None, "for a registration")
        beaten = registration.heard_ms
        await until(lambda: registration.heard_ms != beaten, "for a heartbeat")
        await cluster.create("t", [[1, 2]])
        await until(lambda: "t" in again.image.topics, "for it to follow the metadata")
        assert active.image.brokers[3].fenced
        body = {"topics": [{"name": "deleted", "topic_id": bytes(16)}], "timeout_ms": 9_000}
        await active.ask(Api.DELETE_TOPICS, 6, body)
        await until(lambda: "deleted" not in again.image.topics, "for it to know of the deletion")
        opened.set()
        await starting
        assert not active.image.brokers[3].fenced
        assert again.broker.partition("alone", 0).is_leader
        assert ("deleted", 0) not in {(log.topic, log.partition) for log in again.broker.logs}

    monkeypatch.setattr(broker_module, "OPENING_TURN_MS", 0.0)
    with_cluster(scenario)
