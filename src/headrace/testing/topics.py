"""Topics for tests, through the project's own client, callable with or without a running event loop."""

import asyncio
import threading
from collections.abc import Mapping


def create_topic(
    bootstrap: str, name: str, partitions: int, replication_factor: int, config: Mapping[str, str]
) -> None:
    """Create a topic from blocking code; KafkaError when the broker refuses."""
    from headrace.client.admin import Admin, NewTopic

    async def create() -> None:
        async with Admin({"bootstrap.servers": bootstrap}) as admin:
            await admin.create_topic(NewTopic(name, partitions, replication_factor, dict(config)))

    _run(create())


def _run(work: "asyncio.coroutines.Coroutine[None, None, None]") -> None:  # type: ignore[name-defined]
    try:
        asyncio.get_running_loop()
    except RuntimeError:
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
