"""A leader and its followers, step by step: what counts, who is told, and what is not told yet."""

import pytest

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import topic_config
from headrace.cluster.image import PartitionRegistration
from headrace.records.builder import build_batch
from headrace.replication.follower import Follower
from headrace.replication.partition import Partition
from headrace.server.handlers.offsets import EARLIEST, LATEST, offset_at
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
