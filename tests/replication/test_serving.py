"""What a follower is told through its session: where records are safe, also when nothing is appended any more."""

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import topic_config
from headrace.cluster.image import PartitionRegistration
from headrace.records.builder import build_batch
from headrace.replication.follower import Follower
from headrace.replication.partition import Partition
from headrace.replication.serving import FetchReply, Sessions
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem
from headrace.wire.fetch import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic

TOPIC_ID = b"t" * 16


class Leader:
    """A broker that leads one partition of three replicas, as its sessions see it."""

    def __init__(self) -> None:
        fs = MemoryFileSystem()
        fs.makedirs("t-0")
        self.partition = Partition("t", TOPIC_ID, 0, 0, PartitionLog(fs, "t-0", "t", 0, topic_config({})))
        self.be(leader=1, epoch=1)
        self.replies: list[FetchReply] = []
        self.sessions = Sessions(self, lambda work: work())

    def be(self, leader: int, epoch: int) -> None:
        self.partition.take(PartitionRegistration((1, 2, 3), (1, 2, 3), leader, epoch, epoch), 1, 0.0)

    def find(self, topic_id: bytes, index: int) -> Partition:
        return self.partition

    def follower_moved(self, partition: Partition, follower: Follower) -> None:
        """Nobody joins."""

    def registered_epoch(self, node_id: int) -> int:
        return -1

    def holds_back(self, partition: Partition, follower: Follower) -> bool:
        return False

    def sent(self, partition: Partition, follower: Follower, size: int) -> None:
        """There is room."""

    def suspect(self, partition: Partition, follower: Follower) -> None:
        """Nothing is damaged."""

    def append(self) -> None:
        self.partition.append(memoryview(bytearray(build_batch([(1000, None, b"v", ())]))), 1000)

    def fetch(
        self, follower: int, session: tuple[int, int], offset: int | None = None, forget: bool = False
    ) -> list[tuple[int, int, int]]:
        """Errors, high watermarks and sizes that a follower is told at once."""
        epoch = self.partition.leader_epoch
        named = [] if offset is None else [FetchPartition(0, epoch, offset, epoch if offset else -1, 0, 1000)]
        request = FetchRequest(
            follower, 0, 0, 1, 10_000, 0, *session, [FetchTopic("", TOPIC_ID, named)],
            [ForgottenTopic("", TOPIC_ID, [0])] if forget else [], "",
        )  # fmt: skip
        self.sessions.fetch(request, 0.0, self.replies.append)
        reply = self.replies[-1]
        return [(r.error, r.high_watermark, r.size) for _, results in reply.topics for r in results]

    @property
    def session_id(self) -> int:
        return self.replies[-1].session_id


def test_a_follower_that_begins_anew_is_told_the_high_watermark_though_nothing_is_appended():
    leader = Leader()
    leader.append()
    for _ in range(2):  # the second time it is another process, with the same log
        leader.fetch(2, (0, 0), 1)
        leader.fetch(3, (0, 0), 1)
        assert leader.partition.high_watermark == 1
    assert leader.fetch(2, (0, 0), 1) == [(ErrorCode.NONE, 1, 0)]


def test_a_high_watermark_that_moved_while_a_follower_did_not_watch_is_told_with_the_next_reply():
    leader = Leader()
    leader.fetch(3, (0, 0), 0)
    leader.fetch(2, (0, 0), 0)
    mine = leader.session_id
    leader.append()
    assert leader.fetch(2, (mine, 1))[0][2] > 0  # the record: from here on it does not watch
    leader.fetch(3, (0, 0), 1)
    assert leader.partition.high_watermark == 0
    assert leader.fetch(2, (mine, 2), 1) == [(ErrorCode.NONE, 1, 0)]


def test_a_partition_that_was_led_before_and_forgotten_since_is_not_told_of():
    leader = Leader()
    leader.fetch(2, (0, 0), 0)
    mine = leader.session_id
    leader.be(leader=3, epoch=2)  # whoever watched is to hear of it
    leader.be(leader=1, epoch=3)
    assert leader.fetch(2, (mine, 1), forget=True) == []


def test_a_follower_that_named_the_next_epoch_is_not_refused_for_the_one_before():
    leader = Leader()
    leader.append()
    leader.fetch(3, (0, 0), 1)
    leader.fetch(2, (0, 0), 1)
    mine = leader.session_id
    leader.be(leader=3, epoch=2)  # whoever watched is to hear of it
    leader.be(leader=1, epoch=3)
    assert leader.fetch(2, (mine, 1), 1) == [(ErrorCode.NONE, 1, 0)]


def test_a_follower_that_has_to_cut_its_log_is_told_the_high_watermark_again():
    leader = Leader()
    leader.append()
    leader.fetch(3, (0, 0), 1)
    assert leader.fetch(2, (0, 0), 1) == [(ErrorCode.NONE, 1, 0)]
    mine = leader.session_id
    leader.fetch(2, (mine, 1), 7)
    assert [r.diverging for _, results in leader.replies[-1].topics for r in results] == [(1, 1)]
    assert leader.fetch(2, (mine, 2), 1) == [(ErrorCode.NONE, 1, 0)]


def test_a_leader_that_cannot_read_its_disk_resigns_and_blames_no_follower(monkeypatch):
    leader = Leader()
    leader.append()

    def refuse(*args: object, **kwargs: object) -> None:
        raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "Input/output error")

    monkeypatch.setattr(PartitionLog, "read", refuse)
    told = leader.fetch(2, (0, 0), offset=0)
    assert told == [(ErrorCode.KAFKA_STORAGE_ERROR, 0, 0)]
    for epoch in range(1, 4):
        leader.fetch(2, (leader.session_id, epoch), offset=0)
    assert leader.partition.resigning
    assert not leader.partition.followers[2].is_stuck
