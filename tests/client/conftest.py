"""What the client's tests share: a topic of their own on a broker that all of them use."""

import os
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest

from headrace.testing import Broker

_numbers = count(1)


@pytest.fixture(scope="session")
def cluster_bootstrap() -> Iterator[str]:
    """The cluster under test: `$HEADRACE_TEST_BOOTSTRAP` (any Kafka), else a Headrace broker in memory."""
    given = os.environ.get("HEADRACE_TEST_BOOTSTRAP")
    if given:
        yield given
        return
    with Broker(settings={"group.initial.rebalance.delay.ms": 0}) as broker:
        yield broker.bootstrap


@pytest.fixture
def new_topic(cluster_bootstrap: str) -> Callable[..., str]:
    """Creates a topic with a fresh name."""
    from headrace.testing.topics import create_topic

    def create(partitions: int = 1, **config: str) -> str:
        name = f"client-{os.getpid()}-{next(_numbers)}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        create_topic(cluster_bootstrap, name, partitions, 1, settings)
        return name

    return create


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine with a bound on its time."""
    import asyncio

    def runner(work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(90):
                return await work

        return asyncio.run(bounded())

    return runner
