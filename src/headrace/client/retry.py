"""Calls that are tried again until they succeed, fail for good, or run out of time.

Owns the loop that admin and consumer calls share. Invariant: the wait is bounded by the deadline, and the
error that ends it is the one that kept it from succeeding. The producer has its own, because its retries must
keep order.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.base.errors import ErrorCode, KafkaError
from headrace.client.cluster import Cluster
from headrace.client.errors import NOT_KAFKA_HINT, Disconnected, NotKafka, RequestTimedOut

T = TypeVar("T")

# What no broker knows: news that is on its way, or a name that is wrong.
UNKNOWN = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
NO_ANSWER_HINT = "the broker may be overloaded, paused or gone, or wait for an active controller"


async def with_retries(
    cluster: Cluster,
    timeout_ms: int,
    attempt: Callable[[], Awaitable[T]],
    unknown_timeout_ms: int | None = None,
) -> T:
    """The result of `attempt`, tried again after retriable errors until `timeout_ms` have passed, or
    `unknown_timeout_ms` where that is given and the broker knows no such topic."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    deadline_s = started_s + timeout_ms / 1000
    failures = 0
    last: KafkaError | None = None
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await attempt()
        except TimeoutError:
            raise _out_of_time(cluster, round((deadline_s - started_s) * 1000), last) from None
        except KafkaError as error:
            failures += 1
            last = error
            if not _worth_retrying(error):
                raise
            if not cluster.nodes and isinstance(error, Disconnected | RequestTimedOut):
                deadline_s = min(deadline_s, started_s + cluster.first_contact_timeout_ms / 1000)
            if unknown_timeout_ms is not None and error.code in UNKNOWN:
                deadline_s = min(deadline_s, started_s + unknown_timeout_ms / 1000)
            wait_s = cluster.backoff.wait_ms(failures) / 1000
            if loop.time() + wait_s >= deadline_s:
                raise
            await asyncio.sleep(wait_s)
            if error.code is ErrorCode.NOT_CONTROLLER:
                await _look_again(cluster)


def _worth_retrying(error: KafkaError) -> bool:
    if isinstance(error, NotKafka):
        return False
    return error.retriable


async def _look_again(cluster: Cluster) -> None:
    try:
        await cluster.describe([])
    except KafkaError as error:
        cluster.last_error = error


def _out_of_time(cluster: Cluster, timeout_ms: int, last: KafkaError | None) -> KafkaError:
    """Why there is no result: what the attempts before met, else what happened to the cluster's connections."""
    why = cluster.last_error if last is None else last
    if isinstance(why, Disconnected):
        return Disconnected(
            f"no broker answered within {timeout_ms} ms; the last attempt: {why.message}", why.hint
        )
    if isinstance(why, KafkaError):
        return RequestTimedOut(
            f"no answer within {timeout_ms} ms; the last error: {why.message}", why.hint or NO_ANSWER_HINT
        )
    if not cluster.nodes:
        asked = ", ".join(f"{host}:{port}" for host, port in cluster.config.bootstrap_servers)
        return RequestTimedOut(
            f"no answer from {asked} within {timeout_ms} ms",
            f"{NOT_KAFKA_HINT} and that the broker is not stuck",
        )
    return RequestTimedOut(f"no answer within {timeout_ms} ms", NO_ANSWER_HINT)
