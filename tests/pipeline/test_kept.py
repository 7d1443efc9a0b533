"""What a worker keeps from one micro-batch to the next."""

from collections.abc import Iterator

import pytest

from headrace.client.arrow_txn import Coordination
from headrace.pipeline import kept
from headrace.testing import Broker


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept.close_all()
    yield
    kept.close_all()


async def ask(calls: Coordination) -> int:
    """Which connection it was, told by what the client calls it."""
    return id(await calls.cluster.any_connection())


def test_the_next_task_has_the_connection_of_the_one_before(broker: Broker) -> None:
    config = {"bootstrap.servers": broker.bootstrap}
    assert kept.run(config, ask) == kept.run(dict(config), ask)
    assert kept.run({**config, "client.id": "other"}, ask) != kept.run(config, ask)


def test_a_connection_that_was_lost_meanwhile_is_made_anew(broker: Broker) -> None:
    config = {"bootstrap.servers": broker.bootstrap}

    async def cut(calls: Coordination) -> None:
        connection = await calls.cluster.any_connection()
        connection.close()

    kept.run(config, cut)

    async def works(calls: Coordination) -> bool:
        return bool((await calls.cluster.describe([])).brokers)

    assert kept.run(config, works)


def test_after_an_error_nothing_is_kept(broker: Broker) -> None:
    config = {"bootstrap.servers": broker.bootstrap}
    seen: list[Coordination] = []

    async def fail(calls: Coordination) -> None:
        seen.append(calls)
        await calls.cluster.any_connection()
        raise LookupError("a task failed")

    async def note(calls: Coordination) -> None:
        seen.append(calls)

    with pytest.raises(LookupError):
        kept.run(config, fail)
    kept.run(config, note)
    assert seen[0] is not seen[1]


def test_what_was_not_used_for_long_or_is_another_process_is_not_used(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"bootstrap.servers": broker.bootstrap}
    seen: list[Coordination] = []

    async def note(calls: Coordination) -> None:
        seen.append(calls)

    kept.run(config, note)
    monkeypatch.setattr(kept, "IDLE_S_MAX", 0.0)
    kept.run(config, note)
    monkeypatch.undo()
    (client,) = kept._kept.values()
    client.process += 1  # as if this process had been forked from that one
    kept.run(config, note)
    assert len({id(calls) for calls in seen}) == 3
    client.process -= 1
    client.close()


def test_no_more_than_a_few_are_kept(broker: Broker) -> None:
    for number in range(kept.KEPT_MAX + 2):
        kept.run({"bootstrap.servers": broker.bootstrap, "client.id": str(number)}, ask)
    assert len(kept._kept) == kept.KEPT_MAX
