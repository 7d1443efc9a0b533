"""The metadata of nodes in one process: what is committed is shown, all of it, in order, on each of them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.base.clock import SystemClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import TopicConfig
from headrace.cluster.records import BrokerRecord, ConfigRecord, MetadataRecord, PartitionRecord, TopicRecord
from headrace.consensus.raft import quorum_state
from headrace.consensus.raft.messages import (
    AnyMessage,
    Append,
    Entry,
    HardState,
    VoteReply,
    VoteRequest,
    encode_message,
)
from headrace.consensus.snapshots import find_snapshots
from headrace.server import quorum as quorum_module
from headrace.server.metadata import MetadataStore
from headrace.server.quorum import Quorum, raft_settings
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem
from headrace.storage.recovery import open_log

DEADLINE_S = 60.0
ELECTION_TIMEOUT_MS = 1_500  # a busy machine must not bring about elections that a test does not expect
DIRECTORY = "m-0"
SNAPSHOT_BYTES = 1 << 20


def topic(name: str) -> MetadataRecord:
    return TopicRecord(name, name.encode().ljust(16))


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), DEADLINE_S)


class Node:
    """One node's quorum and store on a disk in memory."""

    def __init__(self, cluster: "Cluster", node_id: int, fs: MemoryFileSystem | None = None) -> None:
        self.cluster = cluster
        self.id = node_id
        self.fs = fs or MemoryFileSystem()
        if not self.fs.exists(DIRECTORY):
            self.fs.makedirs(DIRECTORY)
        loop = asyncio.get_running_loop()
        self.log = open_log(
            self.fs,
            DIRECTORY,
            "m",
            0,
            TopicConfig(),
            clean=False,
            recovery_point=0,
            log_start_offset=0,
            now_ms=0,
        )
        self.flusher: Flusher[PartitionLog] = Flusher(loop)
        self.quorum = Quorum(
            node_id,
            dict.fromkeys(cluster.voters, ""),
            self.log,
            self.flusher,
            SystemClock(),
            loop,
            raft_settings(ELECTION_TIMEOUT_MS),
            cluster.snapshot_bytes,
            cluster.post,
        )
        self.store = MetadataStore(self.quorum)
        self.fatal: list[str] = []
        self.quorum.on_fatal = self.fatal.append

    def close(self) -> None:
        self.quorum.close()
        self.flusher.close()


class Cluster:
    """Nodes that hear each other at once, but for those that are cut off."""

    def __init__(self, voters: int, observers: int = 0, snapshot_bytes: int = SNAPSHOT_BYTES) -> None:
        self.voters = range(1, voters + 1)
        self.snapshot_bytes = snapshot_bytes
        self.cut_off: set[int] = set()
        self.nodes: dict[int, Node] = {}
        for node_id in range(1, voters + observers + 1):
            self.add(node_id)
        for node in self.nodes.values():
            node.quorum.reached(1)  # all are there: no need to wait for each other

    def add(self, node_id: int, fs: MemoryFileSystem | None = None) -> Node:
        node = self.nodes[node_id] = Node(self, node_id, fs)
        node.store.start()
        return node

    def post(self, message: AnyMessage) -> None:
        if self.cut_off.isdisjoint((message.to, message.sender)) and message.to in self.nodes:
            payload = encode_message(message)
            asyncio.get_running_loop().call_soon(lambda: self.nodes[message.to].quorum.receive(payload))

    async def active(self) -> Node:
        await until(lambda: any(node.store.is_active for node in self.nodes.values()))
        return next(node for node in self.nodes.values() if node.store.is_active)

    def restart(self, node_id: int) -> Node:
        old = self.nodes[node_id]
        old.close()
        return self.add(node_id, old.fs)


def with_cluster(
    scenario: Callable[[Cluster], Awaitable[None]],
    voters: int = 1,
    observers: int = 0,
    snapshot_bytes: int = SNAPSHOT_BYTES,
) -> None:
    async def run() -> None:
        cluster = Cluster(voters, observers, snapshot_bytes)
        try:
            await asyncio.wait_for(scenario(cluster), DEADLINE_S)
        finally:
            for node in cluster.nodes.values():
                node.close()

    asyncio.run(run())


def test_records_committed_together_are_shown_together_on_every_node() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        seen: dict[int, list[int]] = {node_id: [] for node_id in cluster.nodes}
        for node_id, node in cluster.nodes.items():
            node.store.watchers.append(lambda old, new, n=node_id: seen[n].append(len(new.topics)))
        await leader.store.commit([topic(f"t{number}") for number in range(50)])
        assert len(leader.store.image.topics) == 50
        await until(lambda: all(len(node.store.image.topics) == 50 for node in cluster.nodes.values()))
        assert all(counts == [50] for counts in seen.values())

    with_cluster(scenario, voters=3, observers=1)


def test_a_lone_node_shows_after_a_restart_what_it_had_committed() -> None:
    async def scenario(cluster: Cluster) -> None:
        store = (await cluster.active()).store
        await asyncio.gather(*[store.commit([topic(f"t{number}")]) for number in range(20)])
        assert store.image == store.pending
        before = store.image
        again = cluster.restart(1).store
        await until(lambda: again.is_active)
        assert again.image == before

    with_cluster(scenario)


def test_a_node_that_does_not_lead_refuses_changes_and_says_who_does() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        other = next(node for node in cluster.nodes.values() if node is not leader)
        await until(lambda: other.quorum.leader == leader.id)
        with pytest.raises(KafkaError) as refused:
            await other.store.commit([topic("t")])
        assert refused.value.code is ErrorCode.NOT_CONTROLLER
        assert f"node {leader.id}" in refused.value.message

    with_cluster(scenario, voters=3)


def test_a_leader_without_a_majority_commits_nothing_and_gives_up() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        await leader.store.commit([topic("before")])
        cluster.cut_off = set(cluster.nodes) - {leader.id}
        with pytest.raises(KafkaError) as lost:
            await leader.store.commit([topic("lost")])
        assert lost.value.code is ErrorCode.NOT_CONTROLLER
        assert "lost" not in leader.store.image.topics
        assert leader.store.pending is leader.store.image
        cluster.cut_off = set()
        await (await cluster.active()).store.commit([topic("after")])
        await until(lambda: all("after" in node.store.image.topics for node in cluster.nodes.values()))

    with_cluster(scenario, voters=3)


def test_another_node_leads_at_once_when_the_leader_is_known_to_be_gone() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        await leader.store.commit([topic("t")])
        del cluster.nodes[leader.id]
        leader.close()
        for node in cluster.nodes.values():
            node.quorum.gone(leader.id)
            assert node.quorum.leader is None
        after = await cluster.active()
        await after.store.commit([topic("u")])
        assert set(after.store.image.topics) == {"t", "u"}

    with_cluster(scenario, voters=3)


def test_a_log_that_is_written_to_for_ever_stays_small_and_a_late_node_gets_its_snapshot() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        value = "x" * 500
        for number in range(200):
            await leader.store.commit([ConfigRecord(2, "t", "k", f"{value}{number}")])
        await until(lambda: bool(find_snapshots(leader.fs, DIRECTORY)))
        late = cluster.add(9)
        leader.quorum.follow([9])
        await until(lambda: late.store.image == leader.store.image)
        again = cluster.restart(9)
        leader.quorum.follow([9])
        await leader.store.commit([topic("t")])
        await until(lambda: again.store.image == leader.store.image)

    with_cluster(scenario, voters=1, snapshot_bytes=10_000)


def test_a_voter_whose_disk_was_replaced_is_sent_the_log_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        await leader.store.commit([topic("t")])
        other = next(node for node in cluster.nodes.values() if node is not leader)
        await until(lambda: other.store.image == leader.store.image)
        other.close()
        again = cluster.add(other.id)
        leader.quorum.reached(other.id)
        await until(lambda: again.store.image == leader.store.image)
        await leader.store.commit([topic("u")])
        await until(lambda: "u" in again.store.image.topics)

    with_cluster(scenario, voters=3)


def test_a_commit_waits_for_the_offset_it_is_asked_for() -> None:
    async def scenario(cluster: Cluster) -> None:
        store = (await cluster.active()).store
        waiting = store.until(store.applied_offset + 2)
        await store.commit([topic("a")])
        assert not waiting.done()
        await store.commit([topic("b")])
        await waiting
        await store.until(0)

    with_cluster(scenario)


def test_records_that_do_not_fit_the_image_reach_nobody() -> None:
    async def scenario(cluster: Cluster) -> None:
        store = (await cluster.active()).store
        end = store.end_offset
        with pytest.raises(KeyError):
            store.commit([ConfigRecord(2, "t", "k", "v"), PartitionRecord(bytes(16), 0, (1,), (1,), 1, 0, 0)])
        assert store.end_offset == end
        assert store.pending is store.image

    with_cluster(scenario)


def full(*args: object, **kwargs: object) -> None:
    """An append to a disk that has no room."""
    raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "No space left on device")


def test_a_full_disk_ends_no_process_and_the_node_goes_on_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        node = await cluster.active()
        await node.store.commit([BrokerRecord(1, "host", 1, None, 1)])

        monkeypatch.setattr(type(node.log), "append", full)
        with pytest.raises(KafkaError):
            await node.store.commit([topic("lost")])
        assert not node.store.is_active
        monkeypatch.undo()
        await until(lambda: node.store.is_active)
        await node.store.commit([topic("found")])
        assert set(node.store.image.topics) == {"found"}
        assert set(node.store.image.brokers) == {1}
        assert not node.fatal

    with_cluster(scenario)


def test_a_vote_that_is_being_written_is_the_only_one_of_its_term_though_the_node_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await cluster.active()
        node = next(each for each in cluster.nodes.values() if each is not leader)
        quorum, term = node.quorum, node.quorum.term + 5
        first, second = [each for each in cluster.nodes if each != node.id]
        cluster.cut_off.add(node.id)
        votes: list[tuple[int, int]] = []
        writes: list[Callable[[], bool]] = []
        looks = 0
        submit, reopen = node.flusher.submit, quorum._reopen

        def post(message: AnyMessage) -> None:
            if isinstance(message, VoteReply) and message.granted and not message.pre:
                votes.append((message.to, message.term))

        def hold(*args: object) -> bool:
            writes.append(lambda: submit(*args))  # type: ignore[arg-type]
            return True

        def look() -> None:
            nonlocal looks
            looks += 1
            reopen()

        def ask(candidate: int) -> None:
            asked = VoteRequest(node.id, candidate, term, 1 << 20, term, transfer=True)
            quorum.receive(encode_message(asked))

        monkeypatch.setattr(quorum, "_post", post)
        monkeypatch.setattr(quorum, "_reopen", look)
        monkeypatch.setattr(node.flusher, "submit", hold)
        monkeypatch.setattr(quorum_module, "REOPEN_AFTER_S", 0.0)
        ask(first)
        with monkeypatch.context() as disk:
            disk.setattr(type(node.log), "append", full)
            end, last = node.log.log_end_offset, leader.quorum.term
            quorum.receive(encode_message(Append(node.id, first, term, end, last, 0, [Entry(term, b"x")])))
            assert quorum.node is None, "its disk refused a write"
        await until(lambda: looks >= 2 or quorum.node is not None)
        ask(second)  # in the term of the vote that is still being written
        assert not votes
        monkeypatch.setattr(node.flusher, "submit", submit)
        writes.pop(0)()
        await until(lambda: quorum.node is not None and quorum.node.vote is not None)
        ask(second)
        ask(first)
        await until(lambda: bool(votes))
        assert set(votes) == {(first, term)}
        assert quorum_state.read_state(node.fs, DIRECTORY) == HardState(term, first)
        assert not node.fatal

    with_cluster(scenario, voters=3)
