"""Closing a client leaves nothing open, also when whoever closes it is cancelled in the middle."""

import asyncio
import gc

import pytest

from headrace.client.cluster import Cluster
from headrace.client.config import producer_config


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_close_that_is_cancelled_closes_all_the_same(cluster_bootstrap: str, run, turns: int) -> None:
    async def close_and_be_cancelled() -> None:
        cluster = Cluster(producer_config({"bootstrap.servers": cluster_bootstrap}))
        connection = await cluster.any_connection()
        closing = asyncio.create_task(cluster.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        async with asyncio.timeout(30):
            await connection.closed.wait()

    run(close_and_be_cancelled())
    gc.collect()  # a connection that was forgotten complains here, and fails the test
