"""Topics for tests, through the project's own client, callable with or without a running event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.cluster import TopicInfo

LEADERS_TIMEOUT_S = 30.0
LOOK_EVERY_S = 0.05
# A broker that is paused or cut off takes a connection and never answers: go on to the next soon.
SHORT_TIMEOUTS = {"socket.connection.setup.timeout.ms": 1_000, "request.timeout.ms": 5_000}


def create_topic(
    bootstrap: str, name: str, partitions: int, replication_factor: int, config: Mapping[str, str]
) -> None:
    """Create a topic from blocking code; KafkaError when the broker refuses."""
    from headrace.client.admin import Admin, NewTopic

    async def create() -> None:
        async with Admin({"bootstrap.servers": bootstrap}) as admin:
            await admin.create_topic(NewTopic(name, partitions, replication_factor, dict(config)))
            async with asyncio.timeout(LEADERS_TIMEOUT_S):
                while not _led(await admin.describe_topics([name])):  # noqa: ASYNC110 (there is no event for it)
                    await asyncio.sleep(LOOK_EVERY_S)

    _run(create())


def describe_topic(bootstrap: str, name: str) -> "TopicInfo":
    """What the cluster says of a topic, asked from blocking code."""
    from headrace.client.admin import Admin

    found: list[TopicInfo] = []

    async def describe() -> None:
        async with Admin({"bootstrap.servers": bootstrap, **SHORT_TIMEOUTS}) as admin:
            found.extend(await admin.describe_topics([name]))

    _run(describe())
    return found[0]


def _led(topics: "list[TopicInfo]") -> bool:
    """Whether every partition has a leader; a cluster may need a moment to tell all its brokers."""
    return all(topic.partitions and all(p.leader >= 0 for p in topic.partitions.values()) for topic in topics)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(work: Coroutine[Any, Any, None]) -> None:
    if not _in_event_loop():
        asyncio.run(work)
        return
    failure: list[BaseException] = []

    def body() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
