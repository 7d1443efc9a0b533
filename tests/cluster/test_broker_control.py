"""Registration, life and fencing as the controller decides them, without a network."""

from headrace.base.errors import ErrorCode
from headrace.cluster.broker_control import BrokerControl
from headrace.cluster.control_messages import HeartbeatRequest, RegisterRequest
from headrace.cluster.image import EMPTY, NO_LEADER, ClusterImage, PartitionRegistration, apply
from headrace.cluster.records import (
    BrokerRecord,
    ClusterRecord,
    MetadataRecord,
    PartitionRecord,
    TopicRecord,
)

TOPIC = b"topic-id-16bytes"
SESSION_MS = 9_000


class Stage:
    """A controller, its image, and the end of its log."""

    def __init__(self, *brokers: int, unclean: bool = False) -> None:
        self.control = BrokerControl(lambda: SESSION_MS, lambda topic: unclean)
        self.image: ClusterImage = apply(EMPTY, [ClusterRecord("c")])
        self.end = 100
        self.now_ms = 0.0
        for broker in brokers:
            self.join(broker)

    def commit(self, records: list[MetadataRecord]) -> None:
        if records:
            self.image = apply(self.image, records)
            self.end += 1

    def register(self, broker: int, incarnation: int = 0, port: int = 0, cluster_id: str = "c") -> ErrorCode:
        request = RegisterRequest(
            broker, bytes([incarnation] * 16), "host", port or 9000 + broker, None, cluster_id
        )
        records, reply = self.control.register(self.image, request, self.end, self.now_ms)
        self.commit(records)
        return ErrorCode(reply.error)

    def beat(
        self, broker: int, *, epoch: int | None = None, offset: int | None = None, **want: bool
    ) -> ErrorCode:
        known = self.image.brokers.get(broker)
        known_epoch = -1 if known is None else known.epoch
        request = HeartbeatRequest(
            broker, known_epoch if epoch is None else epoch, self.end if offset is None else offset, **want
        )
        records, reply = self.control.heartbeat(self.image, request, self.end, self.now_ms)
        self.commit(records)
        return ErrorCode(reply.error)

    def join(self, broker: int, incarnation: int = 0) -> None:
        assert self.register(broker, incarnation) is ErrorCode.NONE
        assert self.beat(broker) is ErrorCode.NONE

    def topic(self, *partitions: tuple[int, ...]) -> None:
        self.commit(
            [
                TopicRecord("t", TOPIC),
                *[PartitionRecord(TOPIC, i, each, each, each[0], 0, 0) for i, each in enumerate(partitions)],
            ]
        )

    def partition(self, index: int = 0) -> PartitionRegistration:
        return self.image.topics["t"].partitions[index]

    def gone(self, broker: int) -> None:
        self.commit(self.control.gone(self.image, broker))

    def tick(self, ms: float, step_ms: float = 100) -> None:
        """Let time pass, as the controller sees it: in small steps."""
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms = min(self.now_ms + step_ms, until_ms)
            while records := self.control.tick(self.image, self.now_ms):
                self.commit(records)


def test_a_broker_is_fenced_until_it_has_its_own_registration() -> None:
    stage = Stage()
    stage.register(1)
    epoch = stage.image.brokers[1].epoch
    assert stage.image.brokers[1].fenced
    stage.beat(1, offset=epoch)
    assert stage.image.brokers[1].fenced, "its own registration is not below that offset"
    stage.beat(1, offset=epoch + 1)
    assert stage.image.brokers[1].may_lead


def test_a_registration_that_is_sent_twice_is_one() -> None:
    stage = Stage(1)
    before = stage.image.brokers[1]
    assert stage.register(1) is ErrorCode.NONE
    assert stage.image.brokers[1] == before


def test_a_broker_that_is_gone_loses_its_leaderships_at_once() -> None:
    stage = Stage(1, 2, 3)
    stage.topic((1, 2, 3), (2, 3, 1))
    stage.gone(1)
    assert stage.image.brokers[1].fenced
    first, second = stage.partition(0), stage.partition(1)
    assert (first.leader, first.isr, first.leader_epoch, first.partition_epoch) == (2, (2, 3), 1, 1)
    assert (second.leader, second.isr, second.leader_epoch, second.partition_epoch) == (2, (2, 3), 0, 1)


def test_a_silent_broker_is_fenced_when_its_session_is_over_and_no_sooner() -> None:
    stage = Stage(1, 2)
    stage.topic((1, 2))
    stage.tick(SESSION_MS - 1)
    assert stage.image.brokers[1].may_lead
    stage.beat(2)
    stage.tick(1)
    assert stage.image.brokers[1].fenced
    assert stage.image.brokers[2].may_lead
    assert stage.partition().leader == 2


def test_a_controller_that_was_held_up_fences_nobody_for_its_own_silence() -> None:
    """A controller that was stopped for a while took everybody else for gone when it woke up."""
    stage = Stage(1, 2)
    stage.tick(1_000)
    stage.tick(5 * SESSION_MS, step_ms=5 * SESSION_MS)
    assert not any(broker.fenced for broker in stage.image.brokers.values())
    stage.beat(2)
    stage.tick(SESSION_MS - 1)
    assert stage.image.brokers[1].fenced
    assert not stage.image.brokers[2].fenced


def test_all_silent_brokers_are_fenced_one_after_the_other() -> None:
    stage = Stage(1, 2, 3)
    stage.topic((1, 2, 3))
    stage.tick(SESSION_MS)
    assert all(broker.fenced for broker in stage.image.brokers.values())
    assert stage.partition().leader == NO_LEADER
    assert len(stage.partition().isr) == 1, "the last member stays"


def test_a_new_controller_gives_everybody_a_whole_session() -> None:
    stage = Stage(1)
    stage.now_ms = 50_000.0
    stage.control = BrokerControl(lambda: SESSION_MS)
    stage.control.begin(stage.image, stage.now_ms)
    stage.tick(SESSION_MS - 1)
    assert stage.image.brokers[1].may_lead
    stage.tick(1)
    assert stage.image.brokers[1].fenced


def test_the_controller_before_is_silent_from_its_last_word_on() -> None:
    stage = Stage(1, 2)
    stage.now_ms = 50_000.0
    stage.control = BrokerControl(lambda: SESSION_MS)
    stage.control.begin(stage.image, stage.now_ms, (1, stage.now_ms - 2_000))
    stage.tick(SESSION_MS - 2_001)
    assert stage.image.brokers[1].may_lead
    stage.tick(1)
    assert stage.image.brokers[1].fenced and stage.image.brokers[2].may_lead


def test_the_last_in_sync_leads_again_when_it_is_back_and_nobody_else_does() -> None:
    stage = Stage(1, 2)
    stage.topic((1, 2))
    stage.gone(2)
    stage.gone(1)
    assert (stage.partition().leader, stage.partition().isr) == (NO_LEADER, (1,))
    stage.join(2, incarnation=1)
    assert stage.partition().leader == NO_LEADER, "it was not in sync"
    stage.join(1, incarnation=1)
    assert (stage.partition().leader, stage.partition().isr) == (1, (1,))


def test_an_unclean_topic_takes_whoever_is_there() -> None:
    stage = Stage(1, 2, unclean=True)
    stage.topic((1, 2))
    stage.gone(2)
    stage.gone(1)
    stage.join(2, incarnation=1)
    assert (stage.partition().leader, stage.partition().isr) == (2, (2,))


def test_a_process_that_begins_anew_leaves_every_isr_although_nobody_noticed_it_was_away() -> None:
    stage = Stage(1, 2)
    stage.topic((1, 2), (2, 1), (1,))
    stage.register(1, incarnation=7)
    assert (stage.partition(0).leader, stage.partition(0).isr) == (2, (2,))
    assert (stage.partition(1).leader, stage.partition(1).isr) == (2, (2,))
    alone = stage.partition(2)
    assert (alone.leader, alone.isr, alone.leader_epoch) == (1, (1,), 1), "a new epoch for a new process"


def test_requests_of_a_process_that_was_replaced_change_nothing() -> None:
    stage = Stage(1)
    old = stage.image.brokers[1].epoch
    stage.register(1, incarnation=7)
    assert stage.beat(1, epoch=old) is ErrorCode.STALE_BROKER_EPOCH
    assert stage.image.brokers[1].fenced


def test_a_second_process_of_the_same_number_is_refused_while_the_first_lives() -> None:
    stage = Stage(1)
    assert stage.register(1, incarnation=7, port=1) is ErrorCode.DUPLICATE_BROKER_REGISTRATION
    stage.tick(SESSION_MS)
    assert stage.register(1, incarnation=7, port=1) is ErrorCode.NONE


def test_a_process_in_the_place_of_another_waits_for_its_session_where_a_vote_depends_on_it() -> None:
    stage = Stage(1)
    request = RegisterRequest(1, bytes([7] * 16), "host", 9001, None, "")

    def refused() -> bool:
        return stage.control.refusal(stage.image, request, stage.now_ms, also_in_place=True) is not None

    assert stage.control.refusal(stage.image, request, stage.now_ms) is None
    assert refused()
    stage.now_ms += SESSION_MS
    assert not refused()
    stage.beat(1)
    assert refused()
    stage.commit(stage.control.gone(stage.image, 1))
    assert not refused(), "it is fenced"


def test_a_directory_of_another_cluster_is_refused() -> None:
    assert Stage().register(1, cluster_id="d") is ErrorCode.INCONSISTENT_CLUSTER_ID


def test_a_broker_that_is_not_registered_is_told_so() -> None:
    assert Stage().beat(1) is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_a_broker_that_shuts_down_hands_over_what_others_can_lead_and_leads_the_rest_on() -> None:
    stage = Stage(1, 2)
    stage.topic((1, 2), (2, 1), (1,))
    stage.beat(1, want_shutdown=True)
    assert stage.image.brokers[1].controlled_shutdown
    assert (stage.partition(0).leader, stage.partition(0).isr) == (2, (2,))
    assert stage.partition(1).isr == (2,)
    assert stage.partition(2).leader == 1
    stage.gone(1)
    assert (stage.partition(2).leader, stage.partition(2).isr) == (NO_LEADER, (1,))


def test_a_broker_said_to_be_gone_that_speaks_is_trusted_from_then_on() -> None:
    """A firewall that refuses the controller's connections would fence and unfence it without end."""
    stage = Stage(1, 2)
    stage.gone(1)
    assert stage.image.brokers[1].fenced
    stage.beat(1)
    assert stage.image.brokers[1].may_lead
    stage.gone(1)
    assert stage.image.brokers[1].may_lead
    stage.beat(2)
    stage.tick(SESSION_MS)
    assert stage.image.brokers[1].fenced


def test_a_broker_that_is_forgotten_is_gone_from_every_isr() -> None:
    stage = Stage(1, 2)
    stage.topic((1, 2))
    stage.gone(1)
    records, error = stage.control.unregister(stage.image, 1)
    stage.commit(records)
    assert error is ErrorCode.NONE
    assert set(stage.image.brokers) == {2}
    assert stage.control.unregister(stage.image, 1)[1] is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_a_registration_begins_after_what_the_log_has_so_epochs_only_grow() -> None:
    stage = Stage(1)
    epochs = [stage.image.brokers[1].epoch]
    for incarnation in range(1, 5):
        stage.register(1, incarnation)
        epochs.append(stage.image.brokers[1].epoch)
    assert epochs == sorted(set(epochs))


def test_registering_from_an_old_log_keeps_what_it_says() -> None:
    stage = Stage()
    stage.commit([BrokerRecord(1, "host", 9001, None, 1)])
    stage.topic((1,))
    stage.join(1, incarnation=3)
    assert stage.image.brokers[1].may_lead
    assert stage.partition().leader == 1
