"""Produce, Fetch and the offsets APIs of a live broker, request by request."""

from struct import pack, unpack_from

import pytest

from headrace.base.errors import ErrorCode
from headrace.records.batch import parse_header
from headrace.server.handlers.fetch import BULK_BYTES
from headrace.testing import Broker
from headrace.wire.apis import SUPPORTED, Api
from tests.server.raw import RawClient, batch, fetch_body, produce_body


@pytest.fixture(scope="module")
def broker():
    with Broker(settings={"auto.create.topics.enable": "false"}) as running:
        yield running


@pytest.fixture
def client(broker):
    with RawClient(broker.host, broker.port) as connected:
        yield connected


@pytest.fixture
def topic(client, request) -> str:
    name = f"t{abs(hash(request.node.name)) % 10**12}"
    client.create(name, partitions=3)
    return name


def partition_of(reply, index: int = 0):
    return reply.responses[0].partitions[index]


# -- Produce ---------------------------------------------------------------------------------------------------------


def test_offsets_are_assigned_in_order(client, topic):
    assert client.produce(topic, batch(b"a", b"b")).base_offset == 0
    assert client.produce(topic, batch(b"c"), acks=1).base_offset == 2


@pytest.mark.parametrize(
    ("partition", "acks", "records", "code"),
    [
        (9, 1, batch(b"x"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (-1, 1, batch(b"x"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (0, 2, batch(b"x"), ErrorCode.INVALID_REQUIRED_ACKS),
        (0, 1, b"", ErrorCode.INVALID_RECORD),
        (0, 1, None, ErrorCode.INVALID_RECORD),
        (0, 1, batch(b"x") + batch(b"y"), ErrorCode.INVALID_RECORD),
        (0, 1, batch(b"x")[:-1], ErrorCode.INVALID_RECORD),
        (0, 1, batch(b"x")[:-1] + b"?", ErrorCode.CORRUPT_MESSAGE),
        (0, 1, batch(b"x" * 1_100_000), ErrorCode.MESSAGE_TOO_LARGE),
        (0, 1, batch(b"x", control=True), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_cannot_be_appended_is_refused_by_kafkas_code(client, topic, partition, acks, records, code):
    assert ErrorCode(client.produce(topic, records, partition, acks).error_code) is code
    assert client.produce(topic, batch(b"next")).base_offset == 0, "nothing of it was appended"


@pytest.mark.parametrize("magic", [0, 1])
def test_older_message_formats_are_refused(client, topic, magic):
    old = pack(">qiIbbqii", 0, 30, 0, magic, 0, 1000, -1, 1) + b"x"
    assert client.produce(topic, old).error_code == ErrorCode.INVALID_RECORD


def test_one_bad_partition_does_not_spoil_the_others(client, topic):
    body = produce_body(topic, batch(b"good"))
    body["topic_data"][0]["partition_data"].append({"index": 1, "records": batch(b"bad")[:-1] + b"?"})
    reply = client.call(Api.PRODUCE, 8, body)
    codes = [p.error_code for p in reply.responses[0].partition_responses]
    assert codes == [ErrorCode.NONE, ErrorCode.CORRUPT_MESSAGE]


def test_no_more_replicas_in_sync_are_wanted_than_the_partition_has(client):
    client.create("two-wanted", min_insync_replicas="2")
    assert client.produce("two-wanted", batch(b"x"), acks=-1).error_code == ErrorCode.NONE


@pytest.mark.parametrize(
    ("version", "code"), [(6, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE), (7, ErrorCode.NONE)]
)
def test_zstd_is_refused_from_a_client_older_than_it(client, topic, version, code):
    reply = client.call(Api.PRODUCE, version, produce_body(topic, batch(b"x" * 100, compression=4)))
    assert reply.responses[0].partition_responses[0].error_code == code


def test_a_produce_without_acks_is_not_answered(client, topic):
    client.send(Api.PRODUCE, 8, produce_body(topic, batch(b"x"), acks=0), answered=False)
    assert client.produce(topic, batch(b"y")).base_offset == 1


def test_a_failed_produce_without_acks_closes_the_connection(client, topic):
    client.send(Api.PRODUCE, 8, produce_body(topic, b"junk", acks=0), answered=False)
    assert client.closed()


def test_records_flushed_before_the_acknowledgement_are_readable_after_it(client):
    client.create("flushed", flush_messages="1")
    for number in range(5):
        assert client.produce("flushed", batch(b"x"), acks=1).base_offset == number
        reply = client.fetch(fetch_body("flushed", {0: number}))
        assert partition_of(reply).high_watermark == number + 1


def test_a_topic_can_be_named_by_its_id(client, topic):
    meta = client.call(Api.METADATA, 12, {"topics": [{"name": topic}]})
    body = produce_body(topic, batch(b"x"))
    body["topic_data"][0]["topic_id"] = meta.topics[0].topic_id
    assert client.call(Api.PRODUCE, 13, body).responses[0].partition_responses[0].base_offset == 0
    body["topic_data"][0]["topic_id"] = bytes(range(16))
    reply = client.call(Api.PRODUCE, 13, body)
    assert reply.responses[0].partition_responses[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


# -- idempotence -----------------------------------------------------------------------------------------------------


def test_a_repeated_batch_is_answered_with_its_first_offset(client, topic):
    producer_id = client.call(Api.INIT_PRODUCER_ID, 4, {"transactional_id": None}).producer_id
    fields = {"producer_id": producer_id, "producer_epoch": 0}
    client.produce(topic, batch(b"a", b"b", base_sequence=0, **fields))
    client.produce(topic, batch(b"c", base_sequence=2, **fields))
    again = client.produce(topic, batch(b"a", b"b", base_sequence=0, **fields))
    assert (again.error_code, again.base_offset) == (ErrorCode.NONE, 0)
    gap = client.produce(topic, batch(b"x", base_sequence=9, **fields))
    assert gap.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce(topic, batch(b"d", base_sequence=3, **fields)).base_offset == 3
    fenced = client.produce(topic, batch(b"x", base_sequence=0, producer_id=producer_id, producer_epoch=2))
    assert fenced.error_code == ErrorCode.NONE
    zombie = client.produce(topic, batch(b"x", base_sequence=4, **fields))
    assert zombie.error_code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_producer_ids_are_never_given_twice(client):
    given = [client.call(Api.INIT_PRODUCER_ID, 1, {"transactional_id": None}).producer_id for _ in range(20)]
    assert len(set(given)) == 20


# -- Fetch -----------------------------------------------------------------------------------------------------------


def test_a_fetch_from_the_middle_of_a_batch_gets_the_whole_batch(client, topic):
    client.produce(topic, batch(b"a", b"b", b"c"))
    client.produce(topic, batch(b"d"))
    records = partition_of(client.fetch(fetch_body(topic, {0: 1}))).records
    assert parse_header(records).base_offset == 0
    assert parse_header(records, parse_header(records).size).base_offset == 3


def test_a_fetch_past_the_end_is_told_what_there_is(client, topic):
    client.produce(topic, batch(b"a"))
    answer = partition_of(client.fetch(fetch_body(topic, {0: 7})))
    assert (answer.error_code, answer.high_watermark, answer.log_start_offset) == (1, 1, 0)


def test_the_first_batch_comes_whole_however_small_the_limits(client, topic):
    for index in (0, 1):
        client.produce(topic, batch(b"x" * 1000), partition=index)
    reply = client.fetch(fetch_body(topic, {0: 0, 1: 0}, max_bytes=10, partition_max_bytes=10))
    sizes = [len(p.records) for p in reply.responses[0].partitions]
    assert sizes[0] > 1000
    assert sizes[1] == 0


def test_a_fetch_at_the_end_waits_until_there_is_something(broker, client, topic):
    client.send(Api.FETCH, 11, fetch_body(topic, {0: 0, 1: 0}, max_wait_ms=15_000))
    with RawClient(broker.host, broker.port) as other:
        other.produce(topic, batch(b"news"), partition=1)
    reply = client.receive()
    assert [len(p.records) > 0 for p in reply.responses[0].partitions] == [False, True]


def test_a_reader_that_catches_up_is_told_at_once_that_it_is_at_the_end_and_waits_only_then(
    broker, client, topic
):
    client.produce(topic, batch(b"x" * (BULK_BYTES + 1)))
    assert len(partition_of(client.fetch(fetch_body(topic, {0: 0}))).records) > BULK_BYTES
    at_the_end = fetch_body(topic, {0: 1}, max_wait_ms=2**31 - 1)
    assert len(partition_of(client.fetch(at_the_end)).records) == 0
    client.send(Api.FETCH, 11, at_the_end)
    with RawClient(broker.host, broker.port) as other:
        other.produce(topic, batch(b"news"))
    assert len(partition_of(client.receive()).records) > 0


def test_a_fetch_waits_for_its_minimum_or_its_time(broker, client, topic):
    size = len(batch(b"x" * 100))
    client.send(Api.FETCH, 11, fetch_body(topic, {0: 0}, max_wait_ms=15_000, min_bytes=2 * size))
    with RawClient(broker.host, broker.port) as other:
        other.produce(topic, batch(b"x" * 100))
        other.produce(topic, batch(b"y" * 100))
    assert len(partition_of(client.receive()).records) == 2 * size
    timed_out = client.fetch(fetch_body(topic, {0: 2}, max_wait_ms=20, min_bytes=1))
    assert len(partition_of(timed_out).records) == 0


def test_a_waiting_fetch_learns_that_its_topic_is_gone(broker, client, topic):
    client.send(Api.FETCH, 11, fetch_body(topic, {0: 0}, max_wait_ms=15_000))
    with RawClient(broker.host, broker.port) as other:
        other.call(Api.DELETE_TOPICS, 4, {"topic_names": [topic], "timeout_ms": 5000})
    assert partition_of(client.receive()).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_an_incremental_session_tells_only_what_changed(client, topic):
    first = client.fetch(fetch_body(topic, {0: 0, 1: 0, 2: 0}, session_epoch=0))
    assert first.session_id != 0
    assert len(first.responses[0].partitions) == 3
    again = {"session_id": first.session_id, "topics": []}
    quiet = client.fetch(fetch_body(topic, {}, session_epoch=1) | again)
    assert quiet.responses == []
    client.produce(topic, batch(b"x"), partition=2)
    loud = client.fetch(fetch_body(topic, {}, session_epoch=2) | again)
    assert [p.partition_index for p in loud.responses[0].partitions] == [2]
    stale = client.fetch(fetch_body(topic, {}, session_epoch=2) | again)
    assert stale.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH


def test_a_client_with_a_wrong_leader_epoch_is_told_so(client, topic):
    body = fetch_body(topic, {0: 0})
    body["topics"][0]["partitions"][0]["current_leader_epoch"] = 5
    assert partition_of(client.fetch(body)).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


def test_replies_come_in_order_although_the_first_waits(broker, client, topic):
    client.send(Api.FETCH, 11, fetch_body(topic, {0: 0}, max_wait_ms=15_000))
    client.send(Api.METADATA, 5, {"topics": [{"name": topic}]})
    client.send(Api.PRODUCE, 8, produce_body(topic, batch(b"x")))
    assert len(partition_of(client.receive()).records) > 0
    assert client.receive().topics[0].name == topic
    assert client.receive().responses[0].partition_responses[0].base_offset == 0


# -- offsets ---------------------------------------------------------------------------------------------------------


def list_offset(client, topic: str, timestamp: int, version: int = 7) -> tuple[int, int, int]:
    wanted = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}]
    body = {"replica_id": -1, "topics": [{"name": topic, "partitions": wanted}]}
    (found,) = client.call(Api.LIST_OFFSETS, version, body).topics[0].partitions
    return found.error_code, found.offset, found.timestamp


def test_offsets_are_found_by_time_and_by_their_special_values(client, topic):
    for number, timestamp in enumerate((1000, 3000, 2000)):
        client.produce(topic, batch(b"%d" % number, timestamp=timestamp))
    assert list_offset(client, topic, -1) == (0, 3, -1)
    assert list_offset(client, topic, -2) == (0, 0, -1)
    assert list_offset(client, topic, -3) == (0, 1, 3000)
    assert list_offset(client, topic, -4, version=8) == (0, 0, -1)
    assert list_offset(client, topic, -5, version=9) == (0, -1, -1)
    assert list_offset(client, topic, 1500) == (0, 1, 3000)
    assert list_offset(client, topic, 3001) == (0, -1, -1)


@pytest.mark.parametrize(
    ("timestamp", "version"), [(-3, 6), (-4, 7), (-5, 8), (-6, 10), (-7, 11), (-(2**63), 11)]
)
def test_a_special_timestamp_is_refused_below_the_version_that_brought_it(client, topic, timestamp, version):
    assert list_offset(client, topic, timestamp, version) == (ErrorCode.UNSUPPORTED_VERSION, -1, -1)


def test_partitions_named_twice_in_a_large_question_hold_nobody_up(client, topic):
    """It was found out by comparing each with all others: a minute for this one."""
    wanted = [
        {"partition_index": n % 29_999, "current_leader_epoch": -1, "timestamp": -1} for n in range(30_000)
    ]
    body = {"replica_id": -1, "topics": [{"name": topic, "partitions": wanted}]}
    answers = client.call(Api.LIST_OFFSETS, 6, body).topics[0].partitions
    assert [answer.partition_index for answer in answers] == list(range(29_999)), "each is told of once"
    assert [n for n, each in enumerate(answers) if each.error_code == ErrorCode.INVALID_REQUEST] == [0]
    assert answers[1].error_code == ErrorCode.NONE


def test_an_epoch_begins_with_its_leader_and_not_with_its_first_record(client, topic):
    def ends(epoch: int) -> tuple[int, int, int]:
        wanted = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}
        body = {"replica_id": -1, "topics": [{"topic": topic, "partitions": [wanted]}]}
        [answer] = client.call(Api.OFFSET_FOR_LEADER_EPOCH, 4, body).topics[0].partitions
        return answer.error_code, answer.leader_epoch, answer.end_offset

    def begins() -> tuple[int, int]:
        wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -2}
        body = {"replica_id": -1, "topics": [{"name": topic, "partitions": [wanted]}]}
        [answer] = client.call(Api.LIST_OFFSETS, 6, body).topics[0].partitions
        return answer.offset, answer.leader_epoch

    assert (ends(0), begins()) == ((0, 0, 0), (0, 0))
    assert ends(1) == ends(-1) == (0, -1, -1)
    client.produce(topic, batch(b"x"))
    assert (ends(0), begins()) == ((0, 0, 1), (0, 0))


@pytest.mark.parametrize(
    ("api", "version"), [(Api.LIST_OFFSETS, 6), (Api.DELETE_RECORDS, 2), (Api.OFFSET_COMMIT, 8)]
)
def test_a_topic_without_partitions_is_not_told_of(client, topic, api, version):
    assert client.call(api, version, {"topics": [{"name": topic, "partitions": []}]}).topics == []


def test_records_are_deleted_up_to_an_offset(client, topic):
    for _ in range(5):
        client.produce(topic, batch(b"x"))

    def delete(offset: int) -> tuple[int, int]:
        body = {"timeout_ms": 1000}
        body["topics"] = [{"name": topic, "partitions": [{"partition_index": 0, "offset": offset}]}]
        (answer,) = client.call(Api.DELETE_RECORDS, 2, body).topics[0].partitions
        return answer.error_code, answer.low_watermark

    assert delete(3) == (0, 3)
    assert list_offset(client, topic, -2) == (0, 3, -1)
    assert partition_of(client.fetch(fetch_body(topic, {0: 2}))).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert delete(6) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert delete(-1) == (0, 5)


def test_of_records_deleted_twice_in_a_request_the_last_word_counts(client, topic):
    for _ in range(5):
        client.produce(topic, batch(b"x"))
    wanted = [{"partition_index": 0, "offset": offset} for offset in (4, 2)]
    body = {"timeout_ms": 1000, "topics": [{"name": topic, "partitions": wanted}]}
    [answer] = client.call(Api.DELETE_RECORDS, 2, body).topics[0].partitions
    assert (answer.error_code, answer.low_watermark) == (0, 2)


def test_records_of_the_clusters_own_topics_are_not_deleted(client):
    client.call(Api.FIND_COORDINATOR, 3, {"key": "any", "key_type": 0})
    wanted = [{"partition_index": 0, "offset": 0}]
    body = {"timeout_ms": 1000, "topics": [{"name": "__consumer_offsets", "partitions": wanted}]}
    [answer] = client.call(Api.DELETE_RECORDS, 2, body).topics[0].partitions
    assert answer.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


# -- what is no request ----------------------------------------------------------------------------------------------


def test_an_unknown_version_of_api_versions_is_answered_in_version_zero(client):
    frame = pack(">hhih", Api.API_VERSIONS, 99, 7, -1)
    client.send_bytes(pack(">i", len(frame)) + frame)
    reply = client.receive_bytes()
    correlation_id, code, count = unpack_from(">ihi", reply)
    assert (correlation_id, code) == (7, ErrorCode.UNSUPPORTED_VERSION)
    assert unpack_from(">hhh", reply, 10) == (Api.API_VERSIONS, *SUPPORTED[Api.API_VERSIONS])
    assert (count, len(reply)) == (1, 16), "of itself and of nothing else"


@pytest.mark.parametrize(("api", "version"), [(3, 99), (3, -1), (999, 0), (-1, 0), (0, 0), (52, 0)])
def test_an_unknown_api_or_version_closes_the_connection(client, api, version):
    frame = pack(">hhih", api, version, 7, -1)
    client.send_bytes(pack(">i", len(frame)) + frame)
    assert client.closed()
