"""Who votes in the quorum of controllers: who comes to, who ceases to, and who must not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode
from headrace.cluster.control_messages import RegisterReply, RegisterRequest
from headrace.cluster.image import ClusterImage
from headrace.consensus.raft.leader import Leadership
from headrace.consensus.raft.messages import VoteRequest, decode_message
from headrace.server.metadata import MetadataStore
from headrace.server.quorum import Quorum
from headrace.testing.ports import free_ports
from headrace.wire.apis import Api
from tests.server.members import Cluster, Node, until, with_cluster


def test_a_node_comes_to_vote_and_another_ceases_to() -> None:
    async def scenario(cluster: Cluster) -> None:
        asked = cluster.nodes[4]
        port = cluster.ports[3]

        async def add() -> int:
            listeners = [{"name": "PLAINTEXT", "host": "127.0.0.1", "port": port}]
            body = {"cluster_id": None, "voter_id": 4, "listeners": listeners, "timeout_ms": 9_000}
            return int((await asked.ask(Api.ADD_RAFT_VOTER, 1, body)).error_code)

        assert await add() == 0
        assert await add() == ErrorCode.DUPLICATE_VOTER
        leader = await cluster.active()
        reply = await asked.ask(Api.REMOVE_RAFT_VOTER, 0, {"cluster_id": None, "voter_id": leader.id})
        # A leader that was replaced before it knew the change committed has it asked for again, of its heir.
        assert reply.error_code in (ErrorCode.NONE, ErrorCode.VOTER_NOT_FOUND)
        await until(lambda: not leader.is_active, "for another controller")
        topic = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
        told = (await asked.ask(Api.DESCRIBE_QUORUM, 2, {"topics": [topic]})).topics[0].partitions[0]
        assert {voter.replica_id for voter in told.current_voters} == {1, 2, 3, 4} - {leader.id}
        assert leader.id in {observer.replica_id for observer in told.observers}

    with_cluster(scenario, brokers=4)


def test_a_quorum_that_was_changed_comes_about_again_where_the_log_says_it_is() -> None:
    async def scenario(cluster: Cluster) -> None:
        listeners = [{"name": "PLAINTEXT", "host": "127.0.0.1", "port": cluster.ports[3]}]
        body = {"cluster_id": None, "voter_id": 4, "listeners": listeners, "timeout_ms": 9_000}
        asked = cluster.nodes[4]
        assert (await asked.ask(Api.ADD_RAFT_VOTER, 1, body)).error_code == 0
        reply = await asked.ask(Api.REMOVE_RAFT_VOTER, 0, {"cluster_id": None, "voter_id": 1})
        assert reply.error_code in (ErrorCode.NONE, ErrorCode.VOTER_NOT_FOUND)
        for number in (3, 4):
            quorum = cluster.nodes[number].broker.metadata.quorum
            await until(lambda q=quorum: set(q.voters) == {2, 3, 4}, "for the voters")
        for node in cluster.alive:
            await node.die()
        for number in (3, 4):  # two of the three that vote now; the settings still tell of 1, 2 and 3
            cluster.nodes[number] = cluster.made(number)
        await asyncio.gather(cluster.nodes[3].start(), cluster.nodes[4].start())
        assert (await cluster.active()).id in (3, 4)

    with_cluster(scenario, brokers=4)


def test_a_node_that_was_left_as_the_only_voter_starts_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        left = await cluster.active()
        others = [node for node in cluster.alive if node is not left]
        for node in others:
            body = {"cluster_id": None, "voter_id": node.id}
            assert (await others[0].ask(Api.REMOVE_RAFT_VOTER, 0, body)).error_code == 0
        await left.die()
        again = cluster.nodes[left.id] = cluster.made(left.id)
        await again.start()
        assert again.is_active and set(again.broker.metadata.quorum.voters) == {left.id}
        await cluster.create("t", [[1, 2, 3]])

    with_cluster(scenario)


def test_a_voter_that_lost_its_disk_votes_again_when_it_has_the_log(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2, 3]])
        for number, lost in enumerate((await cluster.other(), await cluster.active())):
            terms = [node.broker.metadata.quorum.term for node in cluster.alive]
            await lost.die()
            again = cluster.nodes[lost.id] = cluster.made(lost.id, str(tmp_path / str(number)))
            survivor = (await cluster.other(again)).broker.metadata
            seen: list[set[int]] = []

            def look(
                old: ClusterImage, new: ClusterImage, to: list[set[int]] = seen, at: MetadataStore = survivor
            ) -> None:
                to.append(set(at.quorum.voters))

            survivor.watchers.append(look)
            await again.start()
            await until(lambda n=lost.id: n in cluster.partition("t").isr, "for it to be in sync")
            active = await cluster.active()
            quorum = active.broker.metadata.quorum
            await until(lambda q=quorum: set(q.voters) == {1, 2, 3}, "for its vote")
            assert {1, 2, 3} - {lost.id} in seen, "it did not vote while it had no log"
            assert again.broker.metadata.quorum.term >= max(terms)

    with_cluster(scenario)


def heard_of(active: Node, node_id: int) -> list[ErrorCode]:
    """What the controller answers to registrations under a number, from now on."""
    controller, told = active.broker.member.controller, list[ErrorCode]()
    register = controller.register

    def noted(request: RegisterRequest, answer: Callable[[RegisterReply], None]) -> None:
        def note(reply: RegisterReply) -> None:
            if request.node_id == node_id:
                told.append(ErrorCode(reply.error))
            answer(reply)

        register(request, note)

    controller.register = noted  # type: ignore[method-assign]
    return told


def test_a_second_process_of_a_voters_number_takes_no_vote_from_one_that_lives(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        victim, active = await cluster.other(), await cluster.active()
        told = heard_of(active, victim.id)
        second = Node(victim.id, free_ports(1)[0], cluster.settings, str(tmp_path / "second"))
        starting = asyncio.ensure_future(second.process.start())
        await until(lambda: len(told) >= 3, "for it to be answered")
        await second.die()
        await asyncio.gather(starting, return_exceptions=True)
        assert set(told) == {ErrorCode.DUPLICATE_BROKER_REGISTRATION}
        assert active.is_active and set(active.broker.metadata.quorum.voters) == {1, 2, 3}
        assert not active.image.brokers[victim.id].fenced

    with_cluster(scenario)


def test_no_vote_is_taken_while_the_cluster_could_not_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Cluster) -> None:
        lost, active = await cluster.other(), await cluster.active()
        quorum = active.broker.metadata.quorum
        told = heard_of(active, lost.id)
        await lost.die()
        await until(lambda: active.image.brokers[lost.id].fenced, "for it to be fenced")
        with monkeypatch.context() as others:
            others.setattr(Leadership, "can_spare", lambda leadership, voter: False)
            again = cluster.nodes[lost.id] = cluster.made(lost.id, str(tmp_path / "new"))
            starting = asyncio.ensure_future(again.start())
            await until(lambda: told.count(ErrorCode.NOT_CONTROLLER) >= 3, "for it to be put off")
            assert set(quorum.voters) == {1, 2, 3} and ErrorCode.NONE not in told
        await starting
        await until(lambda: set(quorum.voters) == {1, 2, 3}, "for its vote")

    with_cluster(scenario)


def test_a_new_directory_gives_no_vote_to_who_has_a_log(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("t", [[1, 2, 3]])
        left = await cluster.active()
        for node in cluster.alive:
            if node is not left:
                await node.die()
        await until(lambda: not left.is_active, "for it to notice")
        term = left.broker.metadata.quorum.term
        lost = cluster.nodes[left.id % 3 + 1] = cluster.made(left.id % 3 + 1, str(tmp_path / "new"))
        starting = asyncio.ensure_future(lost.process.start())
        asked = 0
        receive = Quorum.receive

        def counted(quorum: Quorum, payload: bytes | memoryview) -> None:
            nonlocal asked
            asked += quorum.node_id == lost.id and isinstance(decode_message(payload), VoteRequest)
            receive(quorum, payload)

        Quorum.receive = counted  # type: ignore[method-assign]
        try:
            await until(lambda: asked >= 3, "for it to be asked for its vote")
        finally:
            Quorum.receive = receive  # type: ignore[method-assign]
        assert not left.is_active and left.broker.metadata.quorum.term == term
        third = cluster.nodes[lost.id % 3 + 1] = cluster.made(lost.id % 3 + 1)
        await third.start()
        await starting
        await until(lambda: lost.id in cluster.partition("t").isr, "for all of them")

    with_cluster(scenario)
