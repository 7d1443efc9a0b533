"""A leader and its followers, step by step: what counts, who is told, and what is not told yet."""

from types import SimpleNamespace

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import topic_config
from headrace.cluster.image import PartitionRegistration
from headrace.records.builder import build_batch
from headrace.replication.follower import Follower
from headrace.replication.partition import Partition
from headrace.server.handlers.offsets import EARLIEST, LATEST, handle_offset_for_leader_epoch, offset_at
from headrace.storage.log import PartitionLog
from headrace.storage.memory import MemoryFileSystem

LAG_MS = 1_000


class Session:
    """A follower's session that remembers what it was told."""

    def __init__(self, epoch: int = 7) -> None:
        self.used_ms = 0.0
        self.replica_epoch = epoch
        self.told: list[str] = []

    def ready(self, follower: Follower) -> None:
        self.told.append("ready")

    def stale(self, follower: Follower) -> None:
        self.told.append("stale")


def registration(isr=(1, 2, 3), leader=1, leader_epoch=4, partition_epoch=10) -> PartitionRegistration:
    return PartitionRegistration((1, 2, 3), tuple(isr), leader, leader_epoch, partition_epoch)


def leader(records: int = 0, isr=(1, 2, 3), **settings: str) -> Partition:
    """A partition of three replicas led by node 1, with some records from before."""
    fs = MemoryFileSystem()
    fs.makedirs("t-0")
    config = topic_config({name.replace("_", "."): value for name, value in settings.items()})
    log = PartitionLog(fs, "t-0", "t", 0, config)
    for _ in range(records):
        log.append(batch(), leader_epoch=3, now_ms=0)
    partition = Partition("t", bytes(16), 0, 4, log, high_watermark=0)
    partition.take(registration(isr), 1, 0.0)
    return partition


def batch() -> memoryview:
    return memoryview(bytearray(build_batch([(1000, b"k", b"v", ())])))


def fetch(partition: Partition, node_id: int, offset: int, now_ms: float = 0.0) -> Session:
    follower = partition.followers[node_id]
    session = follower.session = follower.session or Session()
    session.used_ms = now_ms
    follower.watching = True
    partition.follower_fetched(follower, offset, 0, now_ms)
    return session


def anybody(node_id: int, broker_epoch: int) -> bool:
    return True


def test_a_record_is_safe_when_everybody_in_sync_has_asked_for_what_follows_it():
    partition = leader()
    told: list[ErrorCode] = []
    partition.append(batch(), 0)
    partition.when_safe(1, False, True, told.append)
    fetch(partition, 2, 1)
    assert (partition.high_watermark, told) == (0, [])
    fetch(partition, 3, 1)
    assert (partition.high_watermark, told) == (1, [ErrorCode.NONE])


def test_a_follower_that_watches_is_told_of_an_append_at_once_and_of_the_high_watermark_when_it_suits():
    partition = leader()
    session = fetch(partition, 2, 0)
    partition.append(batch(), 0)
    assert session.told == ["ready"]
    partition.followers[2].watching = True
    fetch(partition, 2, 1)
    fetch(partition, 3, 1)
    assert session.told == ["ready", "stale"]


def test_a_replica_that_is_proposed_counts_before_and_after_the_controller_has_refused_it():
    partition = leader(isr=(1, 2))
    fetch(partition, 2, 0)
    fetch(partition, 3, 0)
    proposal = partition.propose(0.0, LAG_MS, anybody)
    assert proposal is not None
    assert proposal.isr == ((1, -1), (2, -1), (3, 7))
    partition.append(batch(), 0)
    fetch(partition, 2, 1)
    assert partition.high_watermark == 0, "the controller may have taken it by now"
    partition.proposal_refused()
    partition.advance()
    assert partition.high_watermark == 0, "the same proposal may be on its way a second time"
    partition.take(registration((1, 2), partition_epoch=11), 1, 0.0)
    assert partition.high_watermark == 1, "none of an older partition epoch is taken"


def test_a_follower_short_of_the_high_watermark_does_not_join():
    partition = leader(isr=(1, 2))
    partition.append(batch(), 0)
    fetch(partition, 2, 1)
    fetch(partition, 3, 0)
    assert partition.propose(0.0, LAG_MS, anybody) is None
    fetch(partition, 3, 1)
    assert partition.propose(0.0, LAG_MS, lambda node, epoch: False) is None, "fenced, or another process"
    assert partition.propose(0.0, LAG_MS, anybody) is not None


def test_a_follower_that_has_everything_is_in_sync_as_long_as_its_session_is():
    partition = leader()
    fetch(partition, 2, 0, now_ms=0)
    fetch(partition, 3, 0, now_ms=0)
    partition.followers[2].session.used_ms = 5_000
    proposal = partition.propose(5_500, LAG_MS, anybody)
    assert proposal is not None
    assert [node for node, _ in proposal.isr] == [1, 2]


def test_too_few_in_sync_are_told_before_and_after_the_append():
    partition = leader(isr=(1, 2), min_insync_replicas="2")
    told: list[ErrorCode] = []
    partition.check_min_insync()
    partition.append(batch(), 0)
    partition.when_safe(1, False, True, told.append)
    partition.take(registration((1,), partition_epoch=11), 1, 0.0)
    assert told == [ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND]
    with pytest.raises(KafkaError) as refused:
        partition.check_min_insync()
    assert refused.value.code is ErrorCode.NOT_ENOUGH_REPLICAS


def test_a_leader_that_is_deposed_tells_those_who_wait_and_takes_no_more():
    partition = leader()
    told: list[ErrorCode] = []
    partition.append(batch(), 0)
    partition.when_safe(1, False, True, told.append)
    session = fetch(partition, 2, 1)
    session.told.clear()
    partition.take(registration(leader=2, leader_epoch=5, partition_epoch=11), 1, 0.0)
    assert told == [ErrorCode.NOT_LEADER_OR_FOLLOWER]
    assert session.told == ["ready"], "its followers hear of it too"
    with pytest.raises(KafkaError) as refused:
        partition.append(batch(), 0)
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_new_leader_does_not_tell_an_end_that_clients_may_have_seen_beyond():
    partition = leader(records=2)
    with pytest.raises(KafkaError) as refused:
        offset_at(partition, LATEST, 0)
    assert refused.value.code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert offset_at(partition, EARLIEST, 0)[0] == 0
    fetch(partition, 2, 2)
    fetch(partition, 3, 2)
    assert offset_at(partition, LATEST, 0)[0] == 2


def test_an_epoch_in_which_nothing_was_written_leaves_no_trace_when_it_ends():
    partition = leader(records=2)
    assert partition.log.epochs.latest_epoch == 4
    partition.take(registration(leader=2, leader_epoch=5, partition_epoch=11), 1, 0.0)
    assert partition.log.epochs.latest_epoch == 3


def test_a_follower_with_another_history_is_told_where_it_parts():
    partition = leader(records=2)
    assert partition.diverging(2, 3) is None
    assert partition.diverging(3, 3) == (3, 2)
    assert partition.diverging(1, 4) is None
    with pytest.raises(KafkaError):
        partition.diverging(1, 9)


def test_a_leader_cut_off_sends_its_producers_elsewhere_and_one_that_only_lost_the_controller_goes_on():
    partition = leader()
    told: list[ErrorCode] = []
    fetch(partition, 2, 0, now_ms=5_000)
    fetch(partition, 3, 0, now_ms=5_000)
    partition.append(batch(), 0)
    partition.when_safe(1, False, True, told.append)
    partition.set_cut_off(True, 5_500, silence_ms=1_000)
    partition.check_min_insync()
    assert told == []
    partition.set_cut_off(True, 7_000, silence_ms=1_000)
    assert told == [ErrorCode.NOT_LEADER_OR_FOLLOWER]
    with pytest.raises(KafkaError) as refused:
        partition.check_min_insync()
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    partition.set_cut_off(False, 7_000, silence_ms=1_000)
    partition.check_min_insync()


def test_a_follower_of_an_idle_partition_has_the_usual_time_for_the_first_record():
    partition = leader()
    for node_id in (2, 3):
        fetch(partition, node_id, 0)
    for node_id in (2, 3):
        partition.followers[node_id].session.used_ms = 3_600_000.0  # it went on asking for others
    partition.append(batch(), 1000)
    eligible = lambda node, epoch: True  # noqa: E731
    assert not partition.wants_change(3_600_001.0, LAG_MS, eligible)
    assert partition.wants_change(3_600_001.0 + LAG_MS, LAG_MS, eligible)


def test_a_leader_that_resigns_takes_others_in_before_it_leaves():
    partition = leader(records=1, isr=(1,))
    partition.note_damage(0)
    fetch(partition, 2, 1)
    eligible = lambda node, epoch: True  # noqa: E731
    proposal = partition.propose(0.0, LAG_MS, eligible)
    assert [node for node, _ in proposal.isr] == [1, 2]
    partition.take(registration((1, 2), partition_epoch=11), 1, 0.0)
    proposal = partition.propose(10_000.0 - LAG_MS, 10_000.0, eligible)
    assert [node for node, _ in proposal.isr] == [2]


def test_a_leader_alone_in_sync_no_longer_resigns():
    partition = leader(isr=(1, 2))
    partition.note_trouble(KafkaError(ErrorCode.KAFKA_STORAGE_ERROR))
    assert partition.resigning
    partition.take(registration((1,), partition_epoch=11), 1, 0.0)
    assert not partition.resigning


def test_a_follower_with_an_empty_log_past_the_end_is_told_where_the_end_is():
    partition = leader(records=5)
    assert partition.diverging(100, -1) == (4, 5)
    assert partition.diverging(5, -1) is None


def test_a_leader_that_was_alone_knows_its_epoch_when_a_replica_is_added():
    fs = MemoryFileSystem()
    fs.makedirs("t-0")
    partition = Partition("t", bytes(16), 0, 0, PartitionLog(fs, "t-0", "t", 0, topic_config({})))
    partition.take(PartitionRegistration((1,), (1,), 1, 4, 1), 1, 0.0)
    partition.take(PartitionRegistration((1, 2), (1,), 1, 4, 2, (2,)), 1, 0.0)
    assert partition.log.epochs.latest_epoch == 4


def test_a_consumer_that_read_beyond_what_a_new_leader_knows_of_is_not_told_that_it_was_cut_off():
    partition = leader(records=3)
    assert (partition.high_watermark, partition.end_is_known) == (0, False)
    asked = SimpleNamespace(partition=0, current_leader_epoch=4, leader_epoch=3)
    request = SimpleNamespace(replica_id=-1, topics=[SimpleNamespace(topic="t", partitions=[asked])])
    broker = SimpleNamespace(partition=lambda topic, index: partition)
    context = SimpleNamespace(authorize=lambda *args: True, throttle_ms=0)
    (answer,) = handle_offset_for_leader_epoch(broker, context, request)["topics"][0]["partitions"]
    assert (answer["leader_epoch"], answer["end_offset"]) == (3, 3)


def test_followers_that_a_damaged_leader_holds_up_are_not_blamed_for_it():
    partition = leader(records=3)
    for node_id in (2, 3):
        fetch(partition, node_id, 2)
        partition.followers[node_id].asked_again = 2
    assert partition.high_watermark == 2
    partition.note_damage(2)
    proposal = partition.propose(0.0, LAG_MS, lambda node, epoch: True)
    assert [node for node, _ in proposal.isr] == [2, 3], "one of them is to lead"
