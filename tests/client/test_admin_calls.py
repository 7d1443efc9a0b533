"""Every kind of administration over a real cluster, with typed answers."""

import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace.client
from headrace import Admin, Consumer, ErrorCode, KafkaError, NewTopic, Producer, TopicPartition
from headrace.client.access_admin import AclFilter, AclOperation, AclResource, AclRule
from headrace.client.admin import ConfigOp, ConfigResource, ResourceType
from headrace.client.cluster_admin import Election
from headrace.testing import Cluster
from headrace.wire.apis import SUPPORTED, Api

Run = Callable[..., Any]

# What the client does in other words: one setting at a time instead of all, and topics as Metadata describes them.
SAID_OTHERWISE = {Api.ALTER_CONFIGS, Api.DESCRIBE_TOPIC_PARTITIONS, Api.OFFSET_FOR_LEADER_EPOCH}
# What a broker without authentication and quotas, and with one directory, has nothing to say to.
NOTHING_TO_ASK = {
    Api.SASL_HANDSHAKE,
    Api.SASL_AUTHENTICATE,
    Api.CREATE_DELEGATION_TOKEN,
    Api.RENEW_DELEGATION_TOKEN,
    Api.EXPIRE_DELEGATION_TOKEN,
    Api.DESCRIBE_DELEGATION_TOKEN,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS,
    Api.DESCRIBE_CLIENT_QUOTAS,
    Api.ALTER_REPLICA_LOG_DIRS,
}


def test_there_is_a_call_for_every_api_that_the_broker_serves() -> None:
    sources = Path(headrace.client.__file__).parent.glob("*.py")
    named = {name for source in sources for name in re.findall(r"Api\.([A-Z_]+)", source.read_text())}
    assert {api.name for api in SUPPORTED if api not in SAID_OTHERWISE | NOTHING_TO_ASK} - named == set()


async def fill(bootstrap: str, topic: str, count: int) -> None:
    async with Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, partition=0)


def test_groups_are_listed_described_moved_and_deleted(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, group = new_topic(partitions=2), f"group-{uuid.uuid4().hex[:12]}"
    where = TopicPartition(topic, 0)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 10)
        async with Admin(bootstrap_servers=cluster_bootstrap) as admin:
            config = {
                "bootstrap.servers": cluster_bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
            }
            async with Consumer(config) as consumer:
                consumer.subscribe([topic])
                await anext(consumer)
                await consumer.commit()
                info = await admin.describe_group(group)
                assert (info.type, info.state, info.assignor) == ("classic", "Stable", "range")
                (member,) = info.members
                assert member.topics == (topic,)
                assert member.assignment == (where, TopicPartition(topic, 1))
                with pytest.raises(KafkaError) as caught:
                    await admin.alter_group_offsets(group, {where: 5})
                assert caught.value.code is ErrorCode.UNKNOWN_MEMBER_ID
            listed = {listing.group_id: listing for listing in await admin.list_groups()}
            assert listed[group].protocol_type == "consumer"
            assert (await admin.group_lag(group))[where] == (1, 10, 9)
            await admin.alter_group_offsets(group, {where: 5})
            assert (await admin.group_offsets(group))[where].offset == 5
            assert await admin.delete_group_offsets(group, [where]) == {where: None}
            assert where not in await admin.group_offsets(group)
            assert [outcome.error for outcome in await admin.delete_groups([group])] == [None]
            with pytest.raises(KafkaError) as caught:
                await admin.describe_group(group)
            assert caught.value.code is ErrorCode.GROUP_ID_NOT_FOUND
            assert caught.value.hint

    run(body())


def test_records_directories_and_settings_are_administered(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic = new_topic()
    where, nowhere = TopicPartition(topic, 0), TopicPartition(topic, 9)

    async def body() -> None:
        await fill(cluster_bootstrap, topic, 10)
        async with Admin(bootstrap_servers=cluster_bootstrap) as admin:
            assert await admin.delete_records({where: 4}) == {where: 4}
            refused = (await admin.delete_records({nowhere: 1}))[nowhere]
            assert isinstance(refused, KafkaError)
            directories = await admin.describe_log_dirs()
            replicas = [r for dirs in directories.values() for d in dirs for r in d.replicas]
            assert where in replicas
            resource = ConfigResource(ResourceType.TOPIC, topic)
            await admin.alter_configs(resource, [(ConfigOp.SET, "retention.ms", "1000")], validate_only=True)
            before = await admin.describe_configs(resource, ["retention.ms"])
            assert before[0].value != "1000", "a dry run changes nothing"
            with pytest.raises(KafkaError) as caught:
                await admin.create_topic(NewTopic(topic, 1, 1), validate_only=True)
            assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS

    run(body())


def test_the_cluster_and_its_transactions_are_described(
    cluster_bootstrap: str, new_topic: Callable[..., str], run: Run
) -> None:
    topic, name = new_topic(), f"txn-{uuid.uuid4().hex[:12]}"
    where = TopicPartition(topic, 0)

    async def body() -> None:
        async with (
            Admin(bootstrap_servers=cluster_bootstrap) as admin,
            Producer(bootstrap_servers=cluster_bootstrap, transactional_id=name) as producer,
        ):
            cluster = await admin.describe_brokers()
            assert cluster.controller_id in {broker.node_id for broker in cluster.brokers} | {-1}
            assert (await admin.describe_quorum()).leader_id >= 0
            offered = (await admin.cluster.any_connection()).versions
            if Api.LIST_PARTITION_REASSIGNMENTS in offered:
                assert where not in await admin.list_reassignments()
            if Api.ELECT_LEADERS in offered:
                outcome = (await admin.elect_leaders(Election.PREFERRED, [where])).get(where)
                assert outcome is None or outcome.code is ErrorCode.ELECTION_NOT_NEEDED
            features = await admin.describe_features()
            assert features and all(level >= 0 for level in features.values())
            async with producer.transaction() as tx:
                await (await tx.send(topic, b"x", partition=0))
                info = await admin.describe_transaction(name)
                assert (info.state, info.partitions) == ("Ongoing", (where,))
                listed = await admin.list_transactions(["Ongoing"])
                assert name in {listing.transactional_id for listing in listed}
                producers = await admin.describe_producers(where)
                assert [p.producer_id for p in producers] == [info.producer_id]

    run(body())


def test_access_rules_are_kept_by_clusters_that_have_an_authorizer_and_refused_by_others(
    cluster_bootstrap: str, run: Run
) -> None:
    name = f"acl-{uuid.uuid4().hex[:12]}"
    rules = [
        AclRule(AclResource.TOPIC, name, "User:ann", AclOperation.READ),
        AclRule(AclResource.GROUP, name, "User:bob", AclOperation.ALL, host="10.0.0.1"),
    ]

    async def body() -> None:
        async with Admin(bootstrap_servers=cluster_bootstrap) as admin:
            refusals = await admin.create_acls(rules)
            if refusals != [None, None]:
                assert [error.code for error in refusals if error] == [ErrorCode.SECURITY_DISABLED] * 2
                with pytest.raises(KafkaError) as caught:
                    await admin.describe_acls(AclFilter())
                assert caught.value.code is ErrorCode.SECURITY_DISABLED
                [refusal] = await admin.delete_acls([AclFilter(name=name)])
                assert isinstance(refusal, KafkaError)
                assert refusal.code is ErrorCode.SECURITY_DISABLED
                return
            assert await admin.describe_acls(AclFilter(name=name)) == rules
            assert await admin.describe_acls(AclFilter(AclResource.GROUP, name)) == rules[1:]
            assert await admin.delete_acls([AclFilter(name=name, principal="User:ann")]) == [rules[:1]]
            assert await admin.delete_acls([AclFilter(name=name)]) == [rules[1:]]
            assert await admin.describe_acls(AclFilter(name=name)) == []

    run(body())


def test_voters_of_the_metadata_log_leave_and_return(run: Run) -> None:
    with Cluster(3) as cluster:

        async def body() -> None:
            async with Admin(bootstrap_servers=cluster.bootstrap) as admin:
                before = await admin.describe_quorum()
                [leaving, *_] = [each for each in before.voters if each != before.leader_id]
                address = cluster.broker(leaving).bootstrap
                await admin.remove_voter(leaving)
                after = await admin.describe_quorum()
                assert set(after.voters) == set(before.voters) - {leaving}
                with pytest.raises(KafkaError) as caught:
                    await admin.remove_voter(99)
                assert caught.value.code is ErrorCode.VOTER_NOT_FOUND
                await admin.add_voter(leaving, address)
                assert set((await admin.describe_quorum()).voters) == set(before.voters)

        run(body())
