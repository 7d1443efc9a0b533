"""The broker that foreign clients are pointed at: one of our own for each test process, or the one that is named.

`HEADRACE_COMPAT_BOOTSTRAP=host:port` runs the same tests against any Kafka-protocol cluster, real Kafka above all: a
test that fails there asks for something that Kafka does not do.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.compat.samples import QUIET, WAIT_S


@pytest.fixture(scope="session")
def bootstrap(request: pytest.FixtureRequest) -> str:
    named = os.environ.get("HEADRACE_COMPAT_BOOTSTRAP")
    return named or request.getfixturevalue("headrace_session").bootstrap


@pytest.fixture
def now_ms() -> int:
    return int(time.time() * 1000)


@pytest.fixture
def make_topic(bootstrap: str) -> Iterator[Callable[..., str]]:
    """Creates topics with new names; they are gone after the test."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    made: list[str] = []

    def make(partitions: int = 1, **config: object) -> str:
        name = f"compat-{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(WAIT_S)
        made.append(name)
        deadline_s = time.monotonic() + WAIT_S
        while (
            name not in admin.list_topics(timeout=WAIT_S).topics
        ):  # Kafka's brokers learn of it a moment later
            assert time.monotonic() < deadline_s, f"{name} was created but is not listed"
        return name

    yield make
    if made:
        for future in admin.delete_topics(made).values():
            future.exception(WAIT_S)
