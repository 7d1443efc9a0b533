"""Rules of access on a broker that has none: what is asked about them gets Kafka's answer, and nothing is kept."""

import pytest

from headrace.base.errors import ErrorCode
from headrace.testing import Broker
from headrace.wire.apis import Api
from tests.server.raw import RawClient

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def broker():
    with Broker() as running:
        yield running


@pytest.fixture
def admin(broker):
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": broker.bootstrap})


def binding():
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    pattern, permission = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    return AclBinding(ResourceType.TOPIC, "t", pattern, "User:alice", "*", AclOperation.READ, permission)


def any_binding():
    from confluent_kafka.admin import (
        AclBindingFilter,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    pattern, permission = ResourcePatternType.ANY, AclPermissionType.ANY
    return AclBindingFilter(ResourceType.ANY, None, pattern, None, None, AclOperation.ANY, permission)


@pytest.mark.parametrize("call", ["create", "delete"])
def test_a_broker_without_rules_takes_none(admin, call):
    from confluent_kafka import KafkaError, KafkaException

    futures = {
        "create": lambda: list(admin.create_acls([binding()]).values()),
        "delete": lambda: list(admin.delete_acls([any_binding()]).values()),
    }[call]()
    for future in futures:
        with pytest.raises(KafkaException, match="No Authorizer is configured") as refused:
            future.result(TIMEOUT_S)
        assert refused.value.args[0].code() == KafkaError.SECURITY_DISABLED


def test_a_broker_without_rules_says_so(broker):
    anything = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    with RawClient(broker.host, broker.port) as client:
        reply = client.call(Api.DESCRIBE_ACLS, 3, anything)
    assert (reply.error_code, reply.resources) == (ErrorCode.SECURITY_DISABLED, [])
    assert reply.error_message == "No Authorizer is configured."
