"""What the controller decides about topics, in Kafka's codes and words."""

from collections.abc import Callable, Sequence
from itertools import count

import pytest

from headrace.base.errors import ErrorCode
from headrace.base.settings import broker_config
from headrace.cluster.controller import (
    PARTITIONS_PER_REQUEST_MAX,
    Created,
    NewPartitions,
    NewTopic,
    Outcome,
    create_partitions,
    create_topics,
    delete_topics,
    find_topic,
)
from headrace.cluster.image import EMPTY, TOPIC_RESOURCE, ClusterImage, apply
from headrace.cluster.records import BrokerRecord, TopicRecord

CONFIG = broker_config({"num.partitions": "3"})


def ids() -> Callable[[], bytes]:
    numbers = count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def cluster(brokers: int = 1, topics: Sequence[NewTopic] = ()) -> ClusterImage:
    image = apply(EMPTY, [BrokerRecord(n, "localhost", 9000 + n, None, 1) for n in range(1, brokers + 1)])
    records, results = create_topics(image, topics, CONFIG, ids())
    assert all(result.error is None for result in results)
    return apply(image, records)


def create(image: ClusterImage, *topics: NewTopic) -> tuple[ClusterImage, list[Created]]:
    records, results = create_topics(image, topics, CONFIG, ids())
    return apply(image, records), results


def refusal(image: ClusterImage, topic: NewTopic) -> tuple[ErrorCode, str]:
    records, [result] = create_topics(image, [topic], CONFIG, ids())
    assert records == []
    assert result.error is not None
    return result.error.code, result.error.message


def test_a_topic_is_created_with_its_partitions_and_settings() -> None:
    topic = NewTopic("orders", 2, 1, (), [("retention.ms", "5"), ("cleanup.policy", "compact")])
    image, [result] = create(cluster(), topic)
    assert (result.num_partitions, result.replication_factor, result.error) == (2, 1, None)
    assert [partition.replicas for partition in image.topics["orders"].partitions] == [(1,), (1,)]
    assert image.topics["orders"].partitions[0].leader == 1
    assert image.topic_by_id(result.topic_id) is image.topics["orders"]
    assert image.config(TOPIC_RESOURCE, "orders") == {"retention.ms": "5", "cleanup.policy": "compact"}


def test_minus_one_asks_for_the_brokers_defaults() -> None:
    _, [result] = create(cluster(), NewTopic("orders", -1, -1))
    assert (result.num_partitions, result.replication_factor) == (3, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "Topic name is invalid: the empty string is not allowed"),
        (".", "Topic name is invalid: '.' is not allowed"),
        ("..", "Topic name is invalid: '..' is not allowed"),
        (
            "x" * 250,
            f"Topic name is invalid: the length of '{'x' * 250}' is longer than the max allowed length 249",
        ),
        (
            "a b",
            (
                "Topic name is invalid: 'a b' contains one or more characters other than "
                "ASCII alphanumerics, '.', '_' and '-'"
            ),
        ),
        (
            "naïve",
            (
                "Topic name is invalid: 'naïve' contains one or more characters other than "
                "ASCII alphanumerics, '.', '_' and '-'"
            ),
        ),
    ],
)
def test_names_that_no_topic_may_have(name: str, words: str) -> None:
    assert refusal(cluster(), NewTopic(name)) == (ErrorCode.INVALID_TOPIC_EXCEPTION, words)


def test_the_longest_name_and_every_legal_character_are_taken() -> None:
    image, results = create(cluster(), NewTopic("x" * 249), NewTopic("aZ09.-"))
    assert [result.error for result in results] == [None, None]
    assert "aZ09.-" in image.topics


def test_names_that_differ_in_a_dot_collide() -> None:
    image = cluster(topics=[NewTopic("a.b")])
    assert refusal(image, NewTopic("a_b")) == (
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        "Topic 'a_b' collides with existing topic: a.b",
    )


def test_two_topics_of_one_request_collide() -> None:
    _, results = create(cluster(), NewTopic("x.y"), NewTopic("x_y"))
    assert [result.error and result.error.code for result in results] == [
        None,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    ]


def test_a_topic_that_exists_is_not_created_again() -> None:
    image = cluster(topics=[NewTopic("orders")])
    assert refusal(image, NewTopic("orders")) == (
        ErrorCode.TOPIC_ALREADY_EXISTS,
        "Topic 'orders' already exists.",
    )


def test_the_metadata_log_is_no_topic_to_create() -> None:
    assert refusal(cluster(), NewTopic("__cluster_metadata")) == (
        ErrorCode.INVALID_REQUEST,
        "Creation of internal topic __cluster_metadata is prohibited.",
    )


def test_a_name_given_twice_is_refused_once_and_spoils_nothing_else() -> None:
    image, results = create(cluster(), NewTopic("d", 1), NewTopic("e", 1), NewTopic("d", 2))
    assert [(result.name, result.error and result.error.code) for result in results] == [
        ("e", None),
        ("d", ErrorCode.INVALID_REQUEST),
    ]
    assert list(image.topics) == ["e"]


@pytest.mark.parametrize("partitions", [0, -2])
def test_partition_counts_that_cannot_be(partitions: int) -> None:
    assert refusal(cluster(), NewTopic("t", partitions, 1)) == (
        ErrorCode.INVALID_PARTITIONS,
        "Number of partitions was set to an invalid non-positive value.",
    )


@pytest.mark.parametrize("factor", [0, -2])
def test_replication_factors_that_cannot_be(factor: int) -> None:
    assert refusal(cluster(), NewTopic("t", 1, factor)) == (
        ErrorCode.INVALID_REPLICATION_FACTOR,
        "Replication factor must be larger than 0, or -1 to use the default value.",
    )


def test_more_replicas_than_brokers_are_refused() -> None:
    code, words = refusal(cluster(2), NewTopic("t", 1, 3))
    assert code is ErrorCode.INVALID_REPLICATION_FACTOR
    assert "replication factor of 3 cannot be reached because only 2 broker(s) are registered" in words


def test_a_flood_of_partitions_is_refused_before_it_is_built() -> None:
    half = PARTITIONS_PER_REQUEST_MAX // 2 + 1
    records, results = create_topics(cluster(), [NewTopic("a", half), NewTopic("b", half)], CONFIG, ids())
    assert records == []
    assert [result.error and result.error.code for result in results] == [ErrorCode.POLICY_VIOLATION] * 2


@pytest.mark.parametrize(
    ("topic", "code", "words"),
    [
        (
            NewTopic("t", 1, -1, [(0, [1])]),
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but numPartitions was not set to -1.",
        ),
        (
            NewTopic("t", -1, 1, [(0, [1])]),
            ErrorCode.INVALID_REQUEST,
            "A manual partition assignment was specified, but replication factor was not set to -1.",
        ),
        (
            NewTopic("t", -1, -1, [(0, [1]), (0, [1])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "Found multiple manual partition assignments for partition 0",
        ),
        (
            NewTopic("t", -1, -1, [(1, [1])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "partitions should be a consecutive 0-based integer sequence",
        ),
        (
            NewTopic("t", -1, -1, [(0, [])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes an empty replica list.",
        ),
        (
            NewTopic("t", -1, -1, [(0, [1, 1])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes the broker 1 more than once.",
        ),
        (
            NewTopic("t", -1, -1, [(0, [7])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes broker 7, but no such broker is registered.",
        ),
        (
            NewTopic("t", -1, -1, [(0, [1]), (1, [1, 2])]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            (
                "The manual partition assignment includes a partition with 2 replica(s), but this is not "
                "consistent with previous partitions, which have 1 replica(s)."
            ),
        ),
    ],
)
def test_assignments_that_cannot_be(topic: NewTopic, code: ErrorCode, words: str) -> None:
    assert refusal(cluster(2), topic) == (code, words)


def test_a_chosen_assignment_is_kept_in_the_order_of_its_partitions() -> None:
    image, [result] = create(cluster(3), NewTopic("t", -1, -1, [(1, [3, 1]), (0, [2, 3])]))
    assert [partition.replicas for partition in image.topics["t"].partitions] == [(2, 3), (3, 1)]
    assert [partition.leader for partition in image.topics["t"].partitions] == [2, 3]
    assert (result.num_partitions, result.replication_factor) == (2, 2)


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([("nope", "1")], "Unknown topic config name: nope"),
        ([("retention.ms", None)], "Null value not supported for topic configs: retention.ms"),
        (
            [("retention.ms", "x")],
            "Invalid value x for configuration retention.ms: Not a number of type LONG",
        ),
    ],
)
def test_settings_that_cannot_be(configs: list[tuple[str, str | None]], words: str) -> None:
    assert refusal(cluster(), NewTopic("t", 1, 1, (), configs)) == (ErrorCode.INVALID_CONFIG, words)


def test_the_last_of_two_values_for_a_setting_counts() -> None:
    image, _ = create(cluster(), NewTopic("t", 1, 1, (), [("retention.ms", "1"), ("retention.ms", "2")]))
    assert image.config(TOPIC_RESOURCE, "t") == {"retention.ms": "2"}


def test_leaders_of_many_small_topics_are_spread() -> None:
    image, _ = create(cluster(4), *[NewTopic(f"t{number}", 1, 2) for number in range(40)])
    leaders = [topic.partitions[0].leader for topic in image.topics.values()]
    assert {leaders.count(broker) for broker in range(1, 5)} == {10}


# -- more partitions ---------------------------------------------------------------------------------------------------


def grow(image: ClusterImage, *requests: NewPartitions) -> tuple[ClusterImage, list[Outcome]]:
    records, outcomes = create_partitions(image, requests)
    return apply(image, records), outcomes


def test_partitions_are_added_after_those_there_are() -> None:
    image = cluster(2, [NewTopic("t", 2, 2)])
    before = image.topics["t"].partitions
    image, [outcome] = grow(image, NewPartitions("t", 4))
    assert outcome.error is None
    assert image.topics["t"].partitions[:2] == before
    assert [len(partition.replicas) for partition in image.topics["t"].partitions] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (NewPartitions("t", 2), ErrorCode.INVALID_PARTITIONS, "Topic already has 2 partition(s)."),
        (
            NewPartitions("t", 1),
            ErrorCode.INVALID_PARTITIONS,
            "The topic t currently has 2 partition(s); 1 would not be an increase.",
        ),
        (
            NewPartitions("t", -1),
            ErrorCode.INVALID_PARTITIONS,
            "The topic t currently has 2 partition(s); -1 would not be an increase.",
        ),
        (
            NewPartitions("none", 3),
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            "This server does not host this topic-partition.",
        ),
        (
            NewPartitions("t", 4, [[1]]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "Attempted to add 2 additional partition(s), but only 1 assignment(s) were specified.",
        ),
        (
            NewPartitions("t", 3, [[9]]),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "The manual partition assignment includes broker 9, but no such broker is registered.",
        ),
        (
            NewPartitions("t", 100_000),
            ErrorCode.POLICY_VIOLATION,
            "Excessively large number of partitions per request.",
        ),
    ],
)
def test_growth_that_cannot_be(request_: NewPartitions, code: ErrorCode, words: str) -> None:
    image = cluster(1, [NewTopic("t", 2)])
    records, [outcome] = create_partitions(image, [request_])
    assert records == []
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.message) == (code, words)


def test_a_topic_named_twice_does_not_grow() -> None:
    image = cluster(1, [NewTopic("t", 2)])
    after, [outcome] = grow(image, NewPartitions("t", 3), NewPartitions("t", 4))
    assert outcome.error is not None
    assert outcome.error.code is ErrorCode.INVALID_REQUEST
    assert len(after.topics["t"].partitions) == 2


# -- deletion ----------------------------------------------------------------------------------------------------------


def test_a_deleted_topic_leaves_nothing_behind() -> None:
    image = cluster(1, [NewTopic("t", 2, 1, (), [("retention.ms", "5")]), NewTopic("u")])
    topic = find_topic(image, "t", bytes(16))
    assert find_topic(image, None, topic.id) is topic
    after = apply(image, delete_topics([topic]))
    assert list(after.topics) == ["u"]
    assert after.topic_by_id(topic.id) is None
    assert after.configs == {}


def test_a_topic_created_again_has_a_new_id_and_no_old_settings() -> None:
    image = cluster(1, [NewTopic("t", 2, 1, (), [("retention.ms", "5")])])
    first = image.topics["t"]
    image = apply(image, delete_topics([first]))
    image = apply(image, [TopicRecord("t", b"second id 567890")])
    assert image.topics["t"].id != first.id
    assert image.config(TOPIC_RESOURCE, "t") == {}
