"""Transactional requests over the wire: every version makes a round, odd input gets Kafka's error, nothing changes."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.records.builder import build_batch
from headrace.testing import Broker
from headrace.wire.apis import SUPPORTED, Api
from tests.server.raw import RawClient

TOPIC = "written"
NOW_MS = 1_700_000_000_000
CONCURRENT = ErrorCode.CONCURRENT_TRANSACTIONS
_numbers = count(1)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        with connect(running) as client:
            client.create(TOPIC, 4)
            for kind in (0, 1):
                client.call(Api.FIND_COORDINATOR, 3, {"key": "any", "key_type": kind})
        yield running


def connect(broker: Broker) -> RawClient:
    host, _, port = broker.bootstrap.rpartition(":")
    return RawClient(host, int(port))


@pytest.fixture
def client(broker: Broker) -> Iterator[RawClient]:
    with connect(broker) as made:
        yield made


class Producer:
    """A transactional producer that sends what it is told to, right or wrong."""

    def __init__(self, client: RawClient, name: str = "") -> None:
        self.client = client
        self.name = name or f"id-{next(_numbers)}"
        reply = self.ask(Api.INIT_PRODUCER_ID, 4, transaction_timeout_ms=60_000)
        assert reply.error_code == 0
        self.id, self.epoch = reply.producer_id, reply.producer_epoch

    def ask(self, api: Api, version: int, **body: Any) -> Any:
        """Ask, and come back as long as the transaction before is being ended."""
        body = {"transactional_id": self.name, **body}
        if api is not Api.INIT_PRODUCER_ID:
            body = {"producer_id": self.id, "producer_epoch": self.epoch, **body}
        while True:
            reply = self.client.call(api, version, body)
            if getattr(reply, "error_code", 0) != CONCURRENT:
                return reply

    def add(self, *partitions: int, version: int = 3, topic: str = TOPIC, **body: Any) -> list[ErrorCode]:
        wanted = {
            "v3_and_below_transactional_id": self.name,
            "v3_and_below_producer_id": body.get("producer_id", self.id),
            "v3_and_below_producer_epoch": body.get("producer_epoch", self.epoch),
            "v3_and_below_topics": [{"name": topic, "partitions": list(partitions)}],
        }
        while True:
            reply = self.client.call(Api.ADD_PARTITIONS_TO_TXN, version, wanted)
            [found] = reply.results_by_topic_v3_and_below
            codes = [ErrorCode(each.partition_error_code) for each in found.results_by_partition]
            if CONCURRENT not in codes:
                return codes

    def produce(self, partition: int, sequence: int = 0, version: int = 9, **body: Any) -> ErrorCode:
        batch = build_batch(
            [(NOW_MS, b"k", b"v", ())],
            producer_id=body.get("producer_id", self.id),
            producer_epoch=body.get("producer_epoch", self.epoch),
            base_sequence=sequence,
            transactional=body.get("transactional", True),
        )
        data = [{"name": TOPIC, "partition_data": [{"index": partition, "records": batch}]}]
        request = {
            "transactional_id": body.get("name", self.name),
            "acks": -1,
            "timeout_ms": 10_000,
            "topic_data": data,
        }
        [topic] = self.client.call(Api.PRODUCE, version, request).responses
        return ErrorCode(topic.partition_responses[0].error_code)

    def end(self, committed: bool, version: int = 3, **body: Any) -> ErrorCode:
        reply = self.ask(Api.END_TXN, version, committed=committed, **body)
        if version >= 5 and reply.error_code == 0:
            self.id, self.epoch = reply.producer_id, reply.producer_epoch
        return ErrorCode(reply.error_code)

    def commit_offset(self, group: str, version: int = 3, topic: str = TOPIC, **body: Any) -> ErrorCode:
        where = {"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}
        reply = self.ask(
            Api.TXN_OFFSET_COMMIT,
            version,
            group_id=group,
            topics=[{"name": topic, "partitions": [where]}],
            **body,
        )
        return ErrorCode(reply.topics[0].partitions[0].error_code)


def stable_end(client: RawClient, partition: int) -> tuple[int, int]:
    """Where read_committed and other readers end."""
    ends = []
    for isolation in (1, 0):
        where = {"partition_index": partition, "timestamp": -1}
        body = {"isolation_level": isolation, "topics": [{"name": TOPIC, "partitions": [where]}]}
        ends.append(client.call(Api.LIST_OFFSETS, 5, body).topics[0].partitions[0].offset)
    return ends[0], ends[1]


@pytest.mark.parametrize("version", range(6))
def test_every_version_of_the_requests_makes_a_round(version: int, client: RawClient) -> None:
    producer = Producer(client)
    group = f"group-{version}"
    for number, committed in enumerate((True, False)):
        if version < 5:
            assert producer.add(0, 1, version=min(version, 3)) == [ErrorCode.NONE] * 2
            offsets = min(version, SUPPORTED[Api.ADD_OFFSETS_TO_TXN][1])
            assert producer.ask(Api.ADD_OFFSETS_TO_TXN, offsets, group_id=group).error_code == 0
        sequence = 0 if version >= 5 else number
        for partition in (0, 1):
            assert producer.produce(partition, sequence, version=12 if version >= 5 else 9) is ErrorCode.NONE
        assert producer.commit_offset(group, version) is ErrorCode.NONE
        assert producer.end(committed, version) is ErrorCode.NONE


def test_records_of_a_partition_that_was_never_added_are_refused(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.produce(2) is ErrorCode.INVALID_TXN_STATE
    assert producer.add(1) == [ErrorCode.NONE]
    before = stable_end(client, 2)
    assert producer.produce(2) is ErrorCode.INVALID_TXN_STATE
    assert producer.produce(2, version=11) is ErrorCode.TRANSACTION_ABORTABLE
    assert stable_end(client, 2) == before
    assert producer.end(False) is ErrorCode.NONE


def test_wrong_epochs_and_sequences_are_refused_as_each_version_knows_it(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.add(0, producer_epoch=9) == [ErrorCode.PRODUCER_FENCED]
    assert producer.add(0, producer_epoch=9, version=1) == [ErrorCode.INVALID_PRODUCER_EPOCH]
    assert producer.add(0, producer_id=10**6) == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    assert producer.end(True, producer_epoch=9) is ErrorCode.PRODUCER_FENCED
    assert producer.end(True, producer_epoch=9, version=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.add(0) == [ErrorCode.NONE]
    assert producer.produce(0, producer_epoch=9) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.produce(0) is ErrorCode.NONE
    assert producer.produce(0, sequence=7) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.produce(0) is ErrorCode.NONE, "a retry"
    assert producer.produce(0, sequence=1, transactional=False) is ErrorCode.INVALID_TXN_STATE
    assert producer.produce(0, sequence=1, name=None) is ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    heir = Producer(client, producer.name)
    assert producer.produce(0, sequence=1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.end(True) is ErrorCode.PRODUCER_FENCED
    assert heir.epoch == producer.epoch + 2


def test_a_commit_after_an_abort_is_refused_and_an_abort_may_be_repeated(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.end(True) is ErrorCode.INVALID_TXN_STATE, "nothing was begun"
    assert producer.add(3) == [ErrorCode.NONE]
    assert producer.produce(3) is ErrorCode.NONE
    assert producer.end(False) is ErrorCode.NONE
    assert producer.end(True) is ErrorCode.INVALID_TXN_STATE
    assert producer.end(False) is ErrorCode.NONE


def test_partitions_that_are_not_there_keep_the_others_out(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.add(0, 99) == [ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert producer.add(0, topic="nowhere") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert producer.add(0, topic="__consumer_offsets") == [ErrorCode.TOPIC_AUTHORIZATION_FAILED]
    assert producer.end(True) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("verify_only", [True, False])
def test_brokers_too_cannot_add_partitions_that_are_not_there(verify_only: bool, client: RawClient) -> None:
    producer = Producer(client)

    def ask(*partitions: int, name: str = TOPIC) -> list[ErrorCode]:
        wanted = {
            "transactional_id": producer.name,
            "producer_id": producer.id,
            "producer_epoch": producer.epoch,
            "verify_only": verify_only,
            "topics": [{"name": name, "partitions": list(partitions)}],
        }
        [told] = client.call(Api.ADD_PARTITIONS_TO_TXN, 5, {"transactions": [wanted]}).results_by_transaction
        assert [topic.name for topic in told.topic_results] == [name]
        return [ErrorCode(each.partition_error_code) for each in told.topic_results[0].results_by_partition]

    assert ask(0, 99) == [ErrorCode.OPERATION_NOT_ATTEMPTED, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert ask(0, name="nowhere") == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert producer.end(True) is ErrorCode.INVALID_TXN_STATE, "nothing was added"
    assert ask() == [], "a topic without partitions is told as it came"


def test_what_is_named_twice_is_told_twice(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.add(0, 0) == [ErrorCode.NONE] * 2
    assert producer.add() == []
    assert producer.end(False) is ErrorCode.NONE


def test_offsets_are_checked_before_anybody_is_asked_about_the_transaction(client: RawClient) -> None:
    producer = Producer(client)
    nobody = {"producer_id": 10**6}
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for version in range(SUPPORTED[Api.TXN_OFFSET_COMMIT][1] + 1):
        assert producer.commit_offset("g", version, **nobody) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
        assert producer.commit_offset("g", version, topic="nowhere", **nobody) is unknown
        assert producer.commit_offset("", version, **nobody) is ErrorCode.INVALID_GROUP_ID
        assert producer.commit_offset("", version, topic="nowhere") is unknown
        assert producer.commit_offset("g", version, transactional_id="") is ErrorCode.INVALID_REQUEST
        reply = producer.ask(
            Api.TXN_OFFSET_COMMIT, version, group_id="g", topics=[{"name": TOPIC, "partitions": []}]
        )
        assert reply.topics == []


@pytest.mark.parametrize("how", ["offsets", "group"])
def test_offsets_deleted_while_a_transaction_holds_them_do_not_come_back_with_it(
    how: str, client: RawClient
) -> None:
    producer, group = Producer(client), f"deleted by {how}"
    assert producer.ask(Api.ADD_OFFSETS_TO_TXN, 3, group_id=group).error_code == 0
    assert producer.commit_offset(group) is ErrorCode.NONE
    if how == "offsets":
        topics = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
        reply = client.call(Api.OFFSET_DELETE, 0, {"group_id": group, "topics": topics})
        assert reply.topics[0].partitions[0].error_code == 0
    else:
        [result] = client.call(Api.DELETE_GROUPS, 2, {"groups_names": [group]}).results
        assert result.error_code == 0
    assert producer.end(True) is ErrorCode.NONE
    wanted = [{"name": TOPIC, "partition_indexes": [0]}]
    body = {"group_id": group, "topics": wanted, "require_stable": True}
    while (
        found := client.call(Api.OFFSET_FETCH, 7, body).topics[0].partitions[0]
    ).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
        pass
    assert (found.error_code, found.committed_offset) == (0, -1)


def test_offsets_of_a_group_that_is_not_in_the_transaction_are_refused(client: RawClient) -> None:
    producer = Producer(client)
    assert producer.add(0) == [ErrorCode.NONE]
    assert producer.commit_offset("elsewhere") is ErrorCode.INVALID_TXN_STATE
    assert producer.commit_offset("elsewhere", 4) is ErrorCode.TRANSACTION_ABORTABLE
    assert producer.ask(Api.ADD_OFFSETS_TO_TXN, 3, group_id="here").error_code == 0
    assert producer.commit_offset("here", generation_id=3, member_id="m") is ErrorCode.ILLEGAL_GENERATION
    assert producer.commit_offset("here") is ErrorCode.NONE

    def fetched(stable: bool) -> tuple[int, int]:
        wanted = [{"name": TOPIC, "partition_indexes": [0]}]
        reply = client.call(
            Api.OFFSET_FETCH, 7, {"group_id": "here", "topics": wanted, "require_stable": stable}
        )
        [found] = reply.topics[0].partitions
        return found.error_code, found.committed_offset

    assert fetched(True) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert fetched(False) == (0, -1)
    assert producer.end(True) is ErrorCode.NONE
    while fetched(True)[0] == ErrorCode.UNSTABLE_OFFSET_COMMIT:
        pass
    assert fetched(True) == (0, 5)


def test_timeouts_and_ids_out_of_bounds_are_refused(client: RawClient) -> None:
    def init(**body: Any) -> ErrorCode:
        asked = {"transactional_id": "bounds", "transaction_timeout_ms": 1000, **body}
        return ErrorCode(client.call(Api.INIT_PRODUCER_ID, 4, asked).error_code)

    assert init(transaction_timeout_ms=900_001) is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert init(transaction_timeout_ms=0) is ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert init(transactional_id="") is ErrorCode.INVALID_REQUEST
    assert init(transactional_id="x" * 33_000) is ErrorCode.INVALID_REQUEST, "no record could hold it"
    assert init(producer_id=1) is ErrorCode.INVALID_REQUEST
    [state] = client.call(Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["bounds"]}).transaction_states
    assert state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


def test_markers_of_zombies_are_refused_and_those_of_unknown_producers_do_no_harm(client: RawClient) -> None:
    def mark(producer_id: int, epoch: int, coordinator: int, partition: int = 1) -> ErrorCode:
        topics = [{"name": TOPIC, "partition_indexes": [partition]}]
        marker = {
            "producer_id": producer_id,
            "producer_epoch": epoch,
            "transaction_result": True,
            "topics": topics,
            "coordinator_epoch": coordinator,
        }
        reply = client.call(Api.WRITE_TXN_MARKERS, 1, {"markers": [marker]})
        return ErrorCode(reply.markers[0].topics[0].partitions[0].error_code)

    assert mark(10**9, 0, 3) is ErrorCode.NONE
    assert mark(10**9, 0, 2) is ErrorCode.TRANSACTION_COORDINATOR_FENCED
    producer = Producer(client)
    Producer(client, producer.name)  # raises the epoch
    heir = Producer(client, producer.name)
    assert heir.add(1) == [ErrorCode.NONE]
    assert heir.produce(1) is ErrorCode.NONE
    assert mark(heir.id, heir.epoch - 1, 0) is ErrorCode.INVALID_PRODUCER_EPOCH
    stable, end = stable_end(client, 1)
    assert stable < end, "it is still open"
    assert mark(heir.id, heir.epoch, 0, partition=99) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert heir.end(False) is ErrorCode.NONE


def test_markers_for_no_partition_are_not_told_of(client: RawClient) -> None:
    marker = {"producer_id": 1, "producer_epoch": 0, "transaction_result": True, "coordinator_epoch": 0}
    for topics in ([], [{"name": TOPIC, "partition_indexes": []}]):
        assert (
            client.call(Api.WRITE_TXN_MARKERS, 1, {"markers": [{**marker, "topics": topics}]}).markers == []
        )


def test_transactions_are_listed_by_what_is_asked_for(client: RawClient) -> None:
    one, other = Producer(client, "list: one/1"), Producer(client, "list: other")
    assert one.add(0) == [ErrorCode.NONE]

    def listed(version: int = 2, **filters: Any) -> set[str]:
        reply = client.call(Api.LIST_TRANSACTIONS, version, filters)
        assert reply.error_code == 0
        found = {each.transactional_id for each in reply.transaction_states}
        return {name for name in found if name.startswith("list: ")}

    assert listed() == listed(version=0) == {one.name, other.name}
    assert listed(state_filters=["Ongoing"]) == {one.name}
    assert listed(producer_id_filters=[other.id]) == {other.name}
    assert listed(version=1, duration_filter=3_600_000) == {other.name}, "as old as can be"
    assert listed(transactional_id_pattern="") == {one.name, other.name}
    assert listed(transactional_id_pattern="list: .*/[0-9]") == {one.name}
    assert listed(transactional_id_pattern="list") == set(), "the whole id has to match"
    reply = client.call(Api.LIST_TRANSACTIONS, 2, {"transactional_id_pattern": "list("})
    assert reply.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    assert one.end(False) is ErrorCode.NONE


def test_features_are_told_and_changed_within_their_bounds(client: RawClient) -> None:
    def finalized() -> dict[str, int]:
        body = {"client_software_name": "raw", "client_software_version": "1"}
        reply = client.call(Api.API_VERSIONS, 4, body)
        assert [(f.name, f.max_version) for f in reply.supported_features if f.name == "transaction.version"]
        return {each.name: each.max_version_level for each in reply.finalized_features}

    def update(level: int, kind: int, name: str = "transaction.version", **body: Any) -> ErrorCode:
        change = {"feature": name, "max_version_level": level, "upgrade_type": kind}
        return ErrorCode(
            client.call(Api.UPDATE_FEATURES, 1, {"feature_updates": [change], **body}).error_code
        )

    assert finalized()["transaction.version"] == 2
    assert update(1, 1) is ErrorCode.INVALID_UPDATE_VERSION, "lower, and not asked for as such"
    assert update(3, 1) is ErrorCode.INVALID_UPDATE_VERSION
    assert update(1, 1, "no.such.feature") is ErrorCode.INVALID_UPDATE_VERSION
    assert update(2, 9) is ErrorCode.INVALID_UPDATE_VERSION, "no such type"
    assert update(1, 2, validate_only=True) is ErrorCode.NONE
    assert finalized()["transaction.version"] == 2
    assert update(1, 2) is ErrorCode.NONE
    assert finalized()["transaction.version"] == 1
    assert update(2, 1) is ErrorCode.NONE


def test_an_open_transaction_survives_a_kill_of_the_broker(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as running:
        with connect(running) as client:
            client.create(TOPIC, 1)
            client.call(Api.FIND_COORDINATOR, 3, {"key": "any", "key_type": 1})
            producer = Producer(client)
            assert producer.add(0) == [ErrorCode.NONE]
            assert producer.produce(0) is ErrorCode.NONE
        running.kill()
        running.start()
        with connect(running) as client:
            producer.client = client
            assert stable_end(client, 0) == (0, 1)
            assert producer.produce(0) is ErrorCode.NONE, "a retry"
            assert producer.produce(0, sequence=1) is ErrorCode.NONE
            assert producer.end(True) is ErrorCode.NONE
            while stable_end(client, 0)[0] < 3:
                pass
            assert producer.end(True) is ErrorCode.NONE, "a retry"
