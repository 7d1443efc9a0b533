"""The links of this node to the others: who they are, where they are, and whether they are there.

Owns one link for each node and lane. Replies on one connection come in the order of their requests, so what may wait
long gets a lane of its own: a fetch that waits for data must not hold up a heartbeat. Invariants: an address is what
the newest image says of a broker, else what the setting of voters says; a link, once wanted, is kept up. `on_down` may
be called several times for one loss, by several lanes, with `gone` when no process listens there any more. Owned by the
process; used by the Raft host, the registration of this broker, the controller, and replication.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from enum import Enum

from headrace.base.clock import Clock
from headrace.server.peer_link import Address, Link


class Lane(Enum):
    """What a connection between two nodes is for."""

    RAFT = "raft"
    CONTROL = "control"
    """Registration, heartbeats, changes of the ISR: answered as soon as they are decided."""
    FORWARD = "forward"
    """What clients ask of a broker and only the active controller may decide."""
    FETCH = "fetch"
    COORDINATE = "coordinate"
    """What a coordinator asks of the leaders of partitions."""


class Peers:
    """See the module."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        node_id: int,
        voters: Mapping[int, Address] | None = None,
    ) -> None:
        self.node_id = node_id
        self._loop = loop
        self._clock = clock
        self._chance = random.Random()
        self._voters = dict(voters or {})
        self._brokers: dict[int, Address] = {}
        self._links: dict[tuple[int, Lane], Link] = {}
        self._closed_bytes = (0, 0)
        self.on_up: list[Callable[[int], None]] = []
        self.on_down: list[Callable[[int, bool], None]] = []

    def link(self, node_id: int, lane: Lane = Lane.CONTROL) -> Link:
        """The link to a node; it is made, and kept up, from the first call on."""
        found = self._links.get((node_id, lane))
        if found is None:
            found = self._links[node_id, lane] = Link(
                self._loop,
                self._clock,
                self._chance,
                node_id,
                f"headrace-node-{self.node_id}",
                self.address,
                self._up,
                self._down,
            )
            found.open()
        return found

    def address(self, node_id: int) -> Address | None:
        """Where a node is reached, if that is known."""
        return self._brokers.get(node_id) or self._voters.get(node_id)

    def set_brokers(self, brokers: Mapping[int, Address]) -> None:
        """Brokers are at these addresses now. Links to others, but for voters, are given up."""
        self._brokers = dict(brokers)
        for (node_id, _), link in list(self._links.items()):
            if self.address(node_id) is not None:
                link.readdress()
        self.forget_all_but(self._brokers.keys() | self._voters.keys())

    def forget_all_but(self, node_ids: "set[int]") -> None:
        """Close links to nodes that are no more."""
        for node_id, lane in [key for key in self._links if key[0] not in node_ids]:
            link = self._links.pop((node_id, lane))
            self._closed_bytes = self._closed_bytes[0] + link.bytes_in, self._closed_bytes[1] + link.bytes_out
            link.close()

    def traffic(self) -> tuple[int, int]:
        """Bytes that came and went over the links of this node since it began: what it fetched as a follower."""
        received, sent = self._closed_bytes
        for link in self._links.values():
            received += link.bytes_in
            sent += link.bytes_out
        return received, sent

    def _up(self, node_id: int) -> None:
        for listener in self.on_up:
            listener(node_id)

    def _down(self, node_id: int, gone: bool) -> None:
        for listener in self.on_down:
            listener(node_id, gone)

    def close(self) -> None:
        """Close every link."""
        for link in self._links.values():
            link.close()
        self._links.clear()
