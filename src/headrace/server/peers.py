"""The links of this node to the others: who they are, where they are, and whether they are there.

Owns one link for each node and lane. Replies on one connection come in the order of their requests, so what may wait
long gets a lane of its own: a fetch that waits for data must not hold up a heartbeat. Invariants: a link, once wanted,
is kept up; an address is what the newest image says of a broker, else what the setting of voters says, else what the
metadata log says of a voter. `on_down` may be called several times for one loss, by several lanes, with `gone` when no
process listens any more where the cluster knows the node to be. Owned by the process; used by the Raft host, the
registration of this broker, the controller, and replication.

Two lanes must work before there is a newest image: Raft's, and the one for registrations, without which no image ever
tells of a voter that moved while all were down. There the setting comes first, and what is known otherwise is tried in
turn with it; until a voter registers that this process has seen begin: its registration is newer than the setting.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import partial
from typing import Final

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


LANES_OF_QUORUM: Final = (Lane.RAFT, Lane.CONTROL)


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
        self._moved: frozenset[int] = frozenset()
        self._logged: dict[int, Address] = {}
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
                partial(self.addresses, lane),
                self._up,
                self._down,
            )
            found.open()
        return found

    def address(self, node_id: int) -> Address | None:
        """Where a node is, if that is known."""
        return self._brokers.get(node_id) or self._voters.get(node_id) or self._logged.get(node_id)

    def addresses(self, lane: Lane, node_id: int) -> list[Address]:
        """Where to look for a node, in this order."""
        if lane not in LANES_OF_QUORUM or node_id in self._moved:
            known = [self.address(node_id)]
        else:
            known = [each.get(node_id) for each in (self._voters, self._brokers, self._logged)]
        return list(dict.fromkeys([address for address in known if address is not None]))

    def set_brokers(self, brokers: Mapping[int, Address], newer: Collection[int] = ()) -> None:
        """Brokers are at these addresses; `newer` are those that registered since this process did.

        Links to others, but for voters, are given up.
        """
        self._brokers, self._moved = dict(brokers), frozenset(newer)
        self._readdress()

    def set_voters(self, voters: Mapping[int, Address]) -> None:
        """The voters of the metadata log were at these addresses when they came to vote."""
        if voters != self._logged:
            self._logged = dict(voters)
            self._readdress()

    def _readdress(self) -> None:
        for link in list(self._links.values()):
            if self.address(link.node_id) is not None:
                link.readdress()
        self.forget_all_but(self._brokers.keys() | self._voters.keys() | self._logged.keys())

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

    def _down(self, node_id: int, address: Address | None, gone: bool) -> None:
        at_home = address == self.address(node_id)  # elsewhere it may never have been
        for listener in self.on_down:
            listener(node_id, gone and at_home)

    def close(self) -> None:
        """Close every link."""
        for link in self._links.values():
            link.close()
        self._links.clear()
