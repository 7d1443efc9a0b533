"""The hand-written Produce and Fetch codecs say byte for byte what the schema-driven codec says."""

import pytest

from headrace.wire import client_hot, fetch, produce
from headrace.wire.apis import Api
from headrace.wire.messages import Malformed, decode_response, encode_request, encode_response

ID = bytes(range(16))


@pytest.mark.parametrize("version", range(3, 14))
@pytest.mark.parametrize("transactional_id", [None, "tx"])
def test_a_produce_request_is_read_as_the_schema_says(version, transactional_id):
    raw = encode_request(
        Api.PRODUCE,
        version,
        {
            "transactional_id": transactional_id,
            "acks": -1,
            "timeout_ms": 1500,
            "topic_data": [
                {
                    "name": "orders",
                    "topic_id": ID,
                    "partition_data": [{"index": 0, "records": b"abc"}, {"index": 7, "records": b""}],
                },
                {"name": "empty", "topic_id": ID, "partition_data": []},
            ],
        },
    )
    request = produce.decode_produce(version, memoryview(raw), 0)
    assert (request.transactional_id, request.acks, request.timeout_ms) == (transactional_id, -1, 1500)
    first, second = request.topics
    assert (first.name, first.topic_id) == (("", ID) if version >= 13 else ("orders", b""))
    assert [(p.partition, bytes(p.records)) for p in first.partitions] == [(0, b"abc"), (7, b"")]
    assert second.partitions == []
    for cut in range(len(raw)):
        with pytest.raises(Malformed):
            produce.decode_produce(version, memoryview(raw)[:cut], 0)


@pytest.mark.parametrize("version", range(3, 14))
def test_a_produce_reply_is_written_as_the_schema_says(version):
    topic = produce.ProduceTopic("orders", ID, [])
    results = [
        produce.ProduceResult(0, 0, 41, -1, 3),
        produce.ProduceResult(2, 6, leader=(4, 9), message="not here", record_errors=[(3, "no key")]),
    ]
    written = produce.encode_produce_reply(version, [(topic, results)], 12, {4: ("h", 9092, None)})
    assert written == encode_response(
        Api.PRODUCE,
        version,
        {
            "responses": [
                {
                    "name": "orders",
                    "topic_id": ID,
                    "partition_responses": [
                        {"index": 0, "error_code": 0, "base_offset": 41, "log_start_offset": 3},
                        {
                            "index": 2,
                            "error_code": 6,
                            "base_offset": -1,
                            "error_message": "not here",
                            "record_errors": [{"batch_index": 3, "batch_index_error_message": "no key"}],
                            "current_leader": {"leader_id": 4, "leader_epoch": 9},
                        },
                    ],
                }
            ],
            "throttle_time_ms": 12,
            "node_endpoints": [{"node_id": 4, "host": "h", "port": 9092}],
        },
    )


@pytest.mark.parametrize("version", range(4, 19))
def test_a_fetch_request_is_read_as_the_schema_says(version):
    raw = encode_request(
        Api.FETCH,
        version,
        {
            "replica_id": 5,
            "replica_state": {"replica_id": 5, "replica_epoch": 8},
            "max_wait_ms": 500,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "isolation_level": 1,
            "session_id": 77,
            "session_epoch": 2,
            "topics": [
                {
                    "topic": "orders",
                    "topic_id": ID,
                    "partitions": [
                        {
                            "partition": 3,
                            "current_leader_epoch": 6,
                            "fetch_offset": 1234,
                            "last_fetched_epoch": 5,
                            "log_start_offset": 9,
                            "partition_max_bytes": 4096,
                        }
                    ],
                }
            ],
            "forgotten_topics_data": [{"topic": "old", "topic_id": ID, "partitions": [1, 2]}],
            "rack_id": "r1",
        },
    )
    request = fetch.decode_fetch(version, memoryview(raw), 0)
    assert request.replica_id == 5
    assert request.replica_epoch == (8 if version >= 15 else -1)
    assert (request.max_wait_ms, request.min_bytes, request.max_bytes) == (500, 1, 1 << 20)
    assert (request.session_id, request.session_epoch) == ((77, 2) if version >= 7 else (0, -1))
    (topic,) = request.topics
    assert (topic.name, topic.topic_id) == (("", ID) if version >= 13 else ("orders", b""))
    (part,) = topic.partitions
    assert (part.partition, part.offset, part.max_bytes) == (3, 1234, 4096)
    assert part.leader_epoch == (6 if version >= 9 else -1)
    assert part.last_fetched_epoch == (5 if version >= 12 else -1)
    assert part.log_start_offset == (9 if version >= 5 else -1)
    assert [f.partitions for f in request.forgotten] == ([[1, 2]] if version >= 7 else [])
    assert request.rack_id == ("r1" if version >= 11 else "")
    for cut in range(len(raw) - (0 if version < 12 else 14)):
        with pytest.raises(Malformed):
            fetch.decode_fetch(version, memoryview(raw)[:cut], 0)


@pytest.mark.parametrize("version", range(4, 19))
def test_a_fetch_reply_is_written_as_the_schema_says_around_its_ranges(version):
    results = [
        fetch.FetchResult(0, 0, 10, 9, 1, None, -1, [b"AB", b"C"], 3),
        fetch.FetchResult(1, 0, 5, 5, 0, [(7, 2)], 3),
        fetch.FetchResult(2, 6, diverging=(4, 100), leader=(2, 8)),
    ]
    parts, size = fetch.encode_fetch_reply(
        version, [("orders", ID, results)], throttle_time_ms=4, session_id=9, endpoints={2: ("h", 1, "r")}
    )
    written = b"".join(parts)
    assert len(written) == size
    body = {
        "throttle_time_ms": 4,
        "session_id": 9,
        "responses": [
            {
                "topic": "orders",
                "topic_id": ID,
                "partitions": [
                    {
                        "partition_index": 0,
                        "high_watermark": 10,
                        "last_stable_offset": 9,
                        "log_start_offset": 1,
                        "aborted_transactions": None,
                        "records": b"ABC",
                    },
                    {
                        "partition_index": 1,
                        "high_watermark": 5,
                        "last_stable_offset": 5,
                        "log_start_offset": 0,
                        "aborted_transactions": [{"producer_id": 7, "first_offset": 2}],
                        "preferred_read_replica": 3,
                        "records": b"",
                    },
                    {
                        "partition_index": 2,
                        "error_code": 6,
                        "high_watermark": -1,
                        "last_stable_offset": -1,
                        "log_start_offset": -1,
                        "aborted_transactions": None,
                        "records": b"",
                        "diverging_epoch": {"epoch": 4, "end_offset": 100},
                        "current_leader": {"leader_id": 2, "leader_epoch": 8},
                    },
                ],
            }
        ],
        "node_endpoints": [{"node_id": 2, "host": "h", "port": 1, "rack": "r"}],
    }
    assert written == encode_response(Api.FETCH, version, body)
    assert (
        decode_response(Api.FETCH, version, memoryview(written)).responses[0].partitions[0].high_watermark
        == 10
    )


def _produce_body(*records: bytes) -> dict[str, object]:
    entries = [{"index": number, "records": content} for number, content in enumerate(records)]
    return {
        "transactional_id": None,
        "acks": -1,
        "timeout_ms": 1500,
        "topic_data": [{"name": "orders", "topic_id": ID, "partition_data": entries}],
    }


@pytest.mark.parametrize("version", range(3, 14))
@pytest.mark.parametrize("records", [(b"abc",), (b"a" * 200, b"b" * 5000, b""), (b"c" * 300_000,)])
def test_a_client_writes_produce_as_the_schema_says(version, records):
    body = _produce_body(*records)
    written = client_hot.request_parts(Api.PRODUCE, version, body)
    assert b"".join(written) == encode_request(Api.PRODUCE, version, body)
    assert all(any(part is large for part in written) for large in records if len(large) > 4096)


@pytest.mark.parametrize("version", range(4, 19))
@pytest.mark.parametrize("rack", [None, "", "rack-1"])
def test_a_client_writes_fetch_as_the_schema_says(version, rack):
    entry = {"partition": 3, "current_leader_epoch": 5, "fetch_offset": 2**40, "partition_max_bytes": 77}
    body = {
        "replica_id": -1,
        "max_wait_ms": 500,
        "min_bytes": 1,
        "max_bytes": 50_000_000,
        "isolation_level": 1,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": "orders", "topic_id": ID, "partitions": [entry, {**entry, "partition": 4}]}],
    } | ({} if rack is None else {"rack_id": rack})
    [written] = client_hot.request_parts(Api.FETCH, version, body)
    assert written == encode_request(Api.FETCH, version, body)


@pytest.mark.parametrize("version", range(3, 14))
@pytest.mark.parametrize(
    "special",
    [
        {},
        {"error_code": 6, "current_leader": {"leader_id": 4, "leader_epoch": 9}},
        {"error_message": "no"},
        {"record_errors": [{"batch_index": 3, "batch_index_error_message": "no key"}]},
    ],
)
def test_a_client_reads_a_produce_reply_as_the_schema_says(version, special):
    result = {"index": 7, "error_code": 0, "base_offset": 41, "log_append_time_ms": 5, "log_start_offset": 3}
    body = {
        "responses": [{"name": "orders", "topic_id": ID, "partition_responses": [result, result | special]}],
        "throttle_time_ms": 12,
    }
    _read_alike(Api.PRODUCE, version, body)


@pytest.mark.parametrize("version", range(4, 19))
@pytest.mark.parametrize("records", [None, b"", b"abc", b"d" * 70_000])
@pytest.mark.parametrize(
    "special",
    [
        {},
        {"aborted_transactions": []},
        {"aborted_transactions": [{"producer_id": 9, "first_offset": 2}]},
        {"error_code": 6, "current_leader": {"leader_id": 4, "leader_epoch": 9}},
    ],
)
def test_a_client_reads_a_fetch_reply_as_the_schema_says(version, records, special):
    result = {
        "partition_index": 2,
        "error_code": 0,
        "high_watermark": 12,
        "last_stable_offset": 11,
        "log_start_offset": 10,
        "aborted_transactions": None,
        "preferred_read_replica": 4,
        "records": records,
    }
    body = {
        "throttle_time_ms": 3,
        "error_code": 0,
        "session_id": 0,
        "responses": [{"topic": "orders", "topic_id": ID, "partitions": [result, result | special]}],
        "node_endpoints": [{"node_id": 4, "host": "h", "port": 9092}] if special else [],
    }
    _read_alike(Api.FETCH, version, body)


def _read_alike(api: Api, version: int, body: dict[str, object]) -> None:
    """Both codecs read the same, of the whole answer and of every beginning of it."""
    raw = memoryview(encode_response(api, version, body))
    assert client_hot.read_response(api, version, raw, 0) == decode_response(api, version, raw)
    for cut in [*range(min(len(raw), 120)), len(raw) - 1]:
        with pytest.raises(Malformed):
            client_hot.read_response(api, version, raw[:cut], 0)
