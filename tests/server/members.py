"""A whole cluster in one process: the composition root of each node, on one loop, over real sockets."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.base.clock import SystemClock
from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.settings import broker_config
from headrace.cluster.image import ClusterImage, PartitionRegistration
from headrace.server.addresses import CannotServe
from headrace.server.broker import Broker
from headrace.server.main import Process, ServeOptions
from headrace.testing.ports import free_ports
from headrace.wire.apis import Api
from headrace.wire.messages import Message

HOST = "127.0.0.1"
DEADLINE_S = 60.0
LOOK_S = 0.01


async def until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait until a condition holds; TimeoutError when it does not."""

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        while not condition():
            pause = loop.create_future()
            loop.call_later(LOOK_S, pause.set_result, None)
            await pause

    try:
        await asyncio.wait_for(wait(), DEADLINE_S)
    except TimeoutError:
        raise AssertionError(f"waited in vain {what}") from None


class JumpingClock(SystemClock):
    """A clock whose wall time can be set to another day."""

    def __init__(self) -> None:
        self.jump_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.jump_ms


class Node:
    """One node."""

    def __init__(self, node_id: int, port: int, settings: dict[str, str], data_dir: str) -> None:
        self.id = node_id
        self.settings = {**settings, "node.id": str(node_id)}
        self.options = ServeOptions(data_dir, False, HOST, port, self.settings)
        config = broker_config({**self.settings, "listeners": f"PLAINTEXT://{HOST}:{port}"})
        self.stopped = asyncio.Event()
        self.process = Process(self.options, config, asyncio.get_running_loop(), self.stopped.set)
        self.clock = JumpingClock()
        self.process._clock = self.clock
        self.alive = True

    @property
    def broker(self) -> Broker:
        broker = self.process._broker
        assert broker is not None
        return broker

    @property
    def image(self) -> ClusterImage:
        return self.broker.image

    @property
    def is_active(self) -> bool:
        return self.alive and self.process._broker is not None and self.broker.metadata.is_active

    async def start(self) -> None:
        """Start; CannotServe when the node finds that it must not."""
        starting = asyncio.ensure_future(self.process.start())
        failing = asyncio.ensure_future(self.stopped.wait())
        await asyncio.wait((starting, failing), return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
        failing.cancel()
        if self.process.failure is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise CannotServe(self.process.failure)
        await starting

    async def die(self) -> None:
        """Be gone as by a kill: nothing is handed over, connections end, nobody listens."""
        self.alive = False
        process = self.process
        process.failure = process.failure or "killed"
        await process.stop()

    async def stop(self) -> None:
        if self.alive:
            self.alive = False
            await self.process.stop()

    async def ask(self, api: Api, version: int, body: dict[str, Any], timeout_ms: int = 20_000) -> Message:
        """Ask for a change as a broker does that needs one itself, here or by way of the active controller."""
        return await self.broker.member.forwarding.ask(api, version, body, timeout_ms)


class Cluster:
    """Nodes 1 to `voters` vote, those after them only follow."""

    def __init__(self, voters: int, brokers: int, settings: dict[str, str], directory: str) -> None:
        self.directory = directory
        self.ports = free_ports(brokers)
        names = [f"{number}@{HOST}:{self.ports[number - 1]}" for number in range(1, voters + 1)]
        self.settings = {
            "controller.quorum.voters": ",".join(names),
            "broker.heartbeat.interval.ms": "200",
            # A busy machine must not bring about elections that a test does not expect.
            "controller.quorum.election.timeout.ms": "2000",
            **settings,
        }
        self.nodes = {number: self.made(number) for number in range(1, brokers + 1)}

    def made(self, number: int, data_dir: str | None = None) -> Node:
        directory = data_dir or f"{self.directory}/{number}"
        return Node(number, self.ports[number - 1], self.settings, directory)

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    async def active(self) -> Node:
        """The active controller."""
        await until(lambda: any(node.is_active for node in self.alive), "for a controller")
        return next(node for node in self.alive if node.is_active)

    async def other(self, *but: Node) -> Node:
        """A node that is not the active controller, nor any of these."""
        active = await self.active()
        return next(node for node in self.alive if node is not active and node not in but)

    async def create(self, name: str, replicas: list[list[int]], **configs: str) -> None:
        """Make a topic with these replicas, by way of a node that does not control."""
        topic = {
            "name": name,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [{"partition_index": i, "broker_ids": each} for i, each in enumerate(replicas)],
            "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
        }
        reply = await (await self.other()).ask(
            Api.CREATE_TOPICS, 7, {"topics": [topic], "timeout_ms": 20_000}
        )
        if reply.topics[0].error_code:
            raise KafkaError(ErrorCode(reply.topics[0].error_code), reply.topics[0].error_message or "")

    def partition(self, name: str, index: int = 0) -> PartitionRegistration:
        """As the active controller has it."""
        node = next((node for node in self.alive if node.is_active), self.alive[0])
        return node.image.topics[name].partitions[index]


def with_cluster(
    scenario: Callable[[Cluster], Awaitable[None]],
    *,
    voters: int = 3,
    brokers: int = 3,
    settings: dict[str, str] | None = None,
) -> None:
    """Run a scenario on a cluster that is up."""

    async def run(directory: str) -> None:
        cluster = Cluster(voters, brokers, settings or {}, directory)
        try:
            await asyncio.gather(*[node.start() for node in cluster.nodes.values()])
            await asyncio.wait_for(scenario(cluster), DEADLINE_S)
        finally:
            for node in cluster.alive:
                await node.die()

    with tempfile.TemporaryDirectory(prefix="headrace-test-") as directory:
        asyncio.run(run(directory))
