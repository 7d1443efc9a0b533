"""Connections between simulated machines, and between them and clients: streams of bytes that can be late, cut or lost.

A connection behaves as one of TCP does. What is sent arrives once and in order, or the connection breaks; a cut link
holds what is sent until it is mended or someone gives up; a process that is killed resets its connections and refuses
new ones, a machine without power says nothing at all. What was sent before an end gave up still arrives at the other:
so an old request may be served long after the next one. Raft's posts can besides be lost, doubled and reordered one by
one. Invariant: every delivery is an event of the kernel. Links of the real code connect here (`SimLink`), and so do the
simulator's clients.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Protocol

from headrace.security.authorizer import ANONYMOUS
from headrace.server.context import Peer
from headrace.server.peer_link import CONNECT_TIMEOUT_S, Link, _unreachable
from headrace.server.session import Session
from headrace.wire.apis import PRIVATE_RAFT
from tests.sim.cluster_loop import SimLoop
from tests.sim.kernel import MS, Kernel, Machine

_LENGTH = Struct(">i")
RETRANSMIT = 200 * MS
CONNECT_TIMEOUT = round(CONNECT_TIMEOUT_S * 1_000 * MS)

Connected = Callable[["Connection | None", bool], None]
Call = tuple[int, int, Connected, int | None]
"""Who tries to connect to whom, what is done then, and in which life."""


class Accepting(Protocol):
    """A listener, as connections see it."""

    def accept(self, connection: "Connection") -> None: ...


class End(Protocol):
    """Who uses one end of a connection."""

    def arrived(self, data: bytes) -> None: ...

    def broken(self, reset: bool) -> None: ...


class Connection:
    """One stream in each direction. Ends are numbered: 0 connected, 1 accepted."""

    def __init__(self, net: "ClusterNetwork", ids: tuple[int, int]) -> None:
        self.net = net
        self.kernel = net.kernel
        self.ids = ids
        self._ways = (ids, (ids[1], ids[0]))
        self.machines = (net.machines.get(ids[0]), net.machines.get(ids[1]))
        self.lives = tuple([m.life if m is not None else 0 for m in self.machines])
        self.ends: list[End | None] = [None, None]
        self.closed = [False, False]
        self._torn = False
        self._last = [0, 0]
        self._held: tuple[deque[tuple[str, bytes]], deque[tuple[str, bytes]]] = (deque(), deque())

    def fileno(self) -> int:
        return -1

    def send(self, end: int, data: bytes) -> None:
        if self.closed[end]:
            return
        if self.net.resets and self.net.random() < self.net.resets:
            self._reset()
        if not self._torn:
            self._pass_on(end, "data", data)

    def close(self, end: int = 0) -> None:
        """This end is done; the other hears of it after what was sent before."""
        if not self.closed[end]:
            self.closed[end] = True
            self._pass_on(end, "close", b"")

    def _reset(self) -> None:
        """Both ends will hear of it; what is sent until then goes nowhere: nobody must miss what was lost."""
        self._torn = True
        for end in (0, 1):
            self._later(end, self.net.delay(), self._broken, True)

    def _pass_on(self, sender: int, what: str, data: bytes) -> None:
        held, net = self._held[sender], self.net
        if held or (net.cut and self._ways[sender] in net.cut):
            held.append((what, data))
            net.holding[self] = None
            return
        now = self.kernel.now
        arrival = now + net.delay()
        if arrival < self._last[sender]:
            arrival = self._last[sender]
        self._last[sender] = arrival
        receiver = 1 - sender
        if what == "data":
            self._later(receiver, arrival - now, self._arrived, data)
        else:
            self._later(receiver, arrival - now, self._broken, what == "reset")

    def mended(self) -> None:
        """Links may carry again: what was held goes on."""
        for sender in (0, 1):
            if (self.ids[sender], self.ids[1 - sender]) not in self.net.cut:
                held = self._held[sender]
                items = list(held)
                held.clear()
                for what, data in items:
                    self._pass_on(sender, what, data)
        if any(self._held):
            self.net.holding[self] = None

    def _later(self, end: int, delay: int, call: Callable[..., None], *args: Any) -> None:
        machine = self.machines[end]
        if machine is None:
            self.kernel.after(delay, call, end, *args)
        elif machine.life == self.lives[end]:
            self.kernel.after(delay, call, end, *args, machine=machine)

    def _arrived(self, end: int, data: bytes) -> None:
        user = self.ends[end]
        if not self.closed[end] and user is not None:
            user.arrived(data)

    def _broken(self, end: int, reset: bool) -> None:
        user = self.ends[end]
        if not self.closed[end]:
            self.closed[end] = True
            if user is not None:
                user.broken(reset)

    def machine_died(self, end: int, power_lost: bool) -> None:
        """The process of one end is gone. Without power nobody says so."""
        if not self.closed[end]:
            self.closed[end] = True
            if not power_lost:
                self._pass_on(end, "reset", b"")


class ClusterNetwork:
    """All connections."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.random = kernel.random.random
        self.machines: dict[int, Machine] = {}
        self.listeners: dict[int, Accepting] = {}
        self.cut: set[tuple[int, int]] = set()
        self.resets = 0.0
        self.loss = 0.0
        """The share of what is sent that is sent again, and so comes late, with all that is behind it."""
        self.delay_min = MS // 5
        self.delay_spread = MS
        self.post_loss = 0.0
        self.post_copies = 0.0
        self.post_stray = 0.0
        self.connections: dict[int, list[Connection]] = {}
        self.holding: dict[Connection, None] = {}
        self._calling: dict[int, Call] = {}
        self._called = 0
        self.down_silently: set[int] = set()
        """Machines without power: they do not even refuse."""

    def delay(self) -> int:
        delay = self.delay_min + int(self.random() * self.delay_spread)
        if self.loss and self.random() < self.loss:
            delay += RETRANSMIT
        return delay

    def connect(self, here: int, there: int, done: Connected) -> None:
        """`done` gets the connection, or None and whether it was refused; it is called at the connecting side."""
        machine = self.machines.get(here)
        if self._is_cut_off(here, there):
            self._calling[self._called] = (here, there, done, machine and machine.life)
            self.kernel.after(CONNECT_TIMEOUT, self._give_up, self._called, machine=machine)
            self._called += 1
            return
        self.kernel.after(self.delay(), self._reach, here, there, done, machine and machine.life)

    def _is_cut_off(self, here: int, there: int) -> bool:
        return (here, there) in self.cut or (there, here) in self.cut or there in self.down_silently

    def _give_up(self, number: int) -> None:
        call = self._calling.pop(number, None)
        if call is not None:
            call[2](None, False)

    def _call_again(self) -> None:
        """Who tries to connect says so again and again: it is heard when the way is free."""
        for number, (here, there, done, life) in list(self._calling.items()):
            if not self._is_cut_off(here, there):
                del self._calling[number]
                self.kernel.after(self.delay(), self._reach, here, there, done, life)

    def _reach(self, here: int, there: int, done: Connected, life: int | None) -> None:
        machine = self.machines.get(here)
        if machine is not None and machine.life != life:
            return
        listener = self.listeners.get(there)
        if listener is None:
            self.kernel.after(self.delay(), done, None, True, machine=machine)
            return
        connection = Connection(self, (here, there))
        for node in (here, there):
            kept = [c for c in self.connections.get(node, ()) if not (c.closed[0] and c.closed[1])]
            self.connections[node] = [*kept, connection]
        listener.accept(connection)
        self.kernel.after(self.delay(), done, connection, False, machine=machine)

    def died(self, node: int, power_lost: bool) -> None:
        """A machine's process is gone."""
        self.listeners.pop(node, None)
        if power_lost:
            self.down_silently.add(node)
        for connection in self.connections.pop(node, ()):
            for end in (0, 1):
                if connection.ids[end] == node:
                    connection.machine_died(end, power_lost)

    def started(self, node: int) -> None:
        """A machine has power; connections of its earlier lives are reset when the others next look."""
        if node in self.down_silently:
            self.down_silently.discard(node)
            for other, connections in self.connections.items():
                for connection in connections:
                    if node in connection.ids and other != node:
                        end = connection.ids.index(other)
                        if connection.machines[1 - end] is not None:
                            connection._later(end, self.delay(), connection._broken, True)
            self._call_again()

    def mend(self) -> None:
        self.cut.clear()
        self.mended()

    def mended(self) -> None:
        """Something is cut no longer."""
        holding, self.holding = self.holding, {}
        for connection in holding:
            connection.mended()
        self._call_again()

    def heal(self) -> None:
        """Carry everything, soon and once."""
        self.resets = self.loss = self.post_loss = self.post_copies = self.post_stray = 0.0
        self.delay_min, self.delay_spread = MS // 5, MS
        self.mend()

    def split(self, side: set[int], others: set[int], *, one_way: bool = False) -> None:
        """Cut all links from `side` to `others` and, unless one way, back."""
        for here in sorted(side):
            for there in sorted(others - side):
                self.cut.add((here, there))
                if not one_way:
                    self.cut.add((there, here))


def frames_of(data: bytes) -> list[memoryview]:
    """The frames in what was sent at once: whole ones, because this network tears none."""
    view, size = memoryview(data), len(data)
    frames, position = [], 0
    while position < size:
        end = position + 4 + _LENGTH.unpack_from(data, position)[0]
        frames.append(view[position + 4 : end])
        position = end
    return frames


class SimLink(Link):
    """A link of the real code, with a connection of this network for a socket."""

    async def _connect(self) -> None:
        loop = self._loop
        assert isinstance(loop, SimLoop)
        net: ClusterNetwork = loop.machine.network  # type: ignore[assignment]
        future: asyncio.Future[tuple[Connection | None, bool]] = loop.create_future()

        def done(connection: Connection | None, refused: bool) -> None:
            loop.enter(future.set_result, (connection, refused)) if not future.done() else None

        if self._next_address() is None:
            self._connecting = None
            self._lose(_unreachable(self.node_id, "its address is not known"), gone=False)
            return
        net.connect(loop.machine.id, self.node_id, done)
        connection, refused = await future
        self._connecting = None
        if connection is None or connection.closed[0]:
            self._lose(_unreachable(self.node_id, "no connection"), gone=refused)
            return
        connection.ends[0] = self._end = _LinkEnd(self, loop, connection)
        self._connected(connection)  # type: ignore[arg-type]

    def post(self, api: int, version: int, body: Any) -> bool:
        loop = self._loop
        assert isinstance(loop, SimLoop)
        net: ClusterNetwork = loop.machine.network  # type: ignore[assignment]
        if api == PRIVATE_RAFT:
            if net.post_loss and net.random() < net.post_loss:
                return True
            if net.post_stray and net.random() < net.post_stray:
                late = net.random() * 0.3
                loop.call_later(late, super().post, api, version, body)
                return True
            if net.post_copies and net.random() < net.post_copies:
                super().post(api, version, body)
        return super().post(api, version, body)

    def _flush(self) -> None:
        self._flush_due = False
        sock: Any = self._sock
        if not self.up or sock is None or not self._out:
            return
        data = b"".join(self._out)
        self._out.clear()
        self._unsent = 0
        sock.send(0, data)


class _LinkEnd:
    def __init__(self, link: SimLink, loop: SimLoop, connection: Connection) -> None:
        self._link = link
        self._loop = loop
        self._connection = connection

    def arrived(self, data: bytes) -> None:
        self._loop.enter(self._take, data)

    def _take(self, data: bytes) -> None:
        for frame in frames_of(data):
            if self._link._sock is self._connection:  # type: ignore[comparison-overlap]
                self._link._take(frame)

    def broken(self, reset: bool) -> None:
        self._loop.enter(self._lose, reset)

    def _lose(self, reset: bool) -> None:
        if self._link._sock is self._connection:  # type: ignore[comparison-overlap]
            self._link._lose(_unreachable(self._link.node_id, "the connection broke"), gone=reset)


class SimListener:
    """The listener of a simulated machine: the real sessions, over connections of this network."""

    def __init__(self, loop: SimLoop, clock: Any, limits: Any, authorizer: Any, quotas: Any) -> None:
        self.limits = limits
        self._loop = loop
        self._route: Any = None
        self._authorizer = authorizer
        self._quotas = quotas
        self._net: ClusterNetwork = loop.machine.network  # type: ignore[assignment]
        self._accepted: list[_Served] = []

    def bind(self, host: str, port: int) -> int:
        return port

    def start(self, route: Any) -> None:
        self._route = route
        self._net.listeners[self._loop.machine.id] = self

    def accept(self, connection: Connection) -> None:
        peer = Peer(ANONYMOUS, "sim", self._authorizer, 0)
        served = _Served(self._loop, connection, peer, self._route, self._quotas)
        self._accepted = [each for each in self._accepted if not each.connection.closed[1]]
        self._accepted.append(served)

    def stop_accepting(self) -> None:
        self._net.listeners.pop(self._loop.machine.id, None)

    def close(self) -> None:
        for served in self._accepted:
            served.connection.close(1)


class _NoCutter:
    def close(self) -> None:
        """Nothing is held."""


class _Served:
    """The accepting end of a connection, with its session."""

    def __init__(self, loop: SimLoop, connection: Connection, peer: Peer, route: Any, quotas: Any) -> None:
        self.connection = connection
        self._loop = loop
        self._session = Session(self, peer, _NoCutter(), route, quotas)  # type: ignore[arg-type]
        connection.ends[1] = self

    def arrived(self, data: bytes) -> None:
        self._loop.enter(self._serve, data)

    def _serve(self, data: bytes) -> None:
        session = self._session
        session._working = True
        for frame in frames_of(data):
            if session._closed:
                break
            session._serve(frame)
        session._working = False
        session.flush()

    def broken(self, reset: bool) -> None:
        self._loop.enter(self._session.closed)

    def send(self, parts: Sequence[Any]) -> None:
        data = b"".join([part.read() if hasattr(part, "read") else part for part in parts])
        self.connection.send(1, data)
        self._session.sent(len(data))

    def close(self) -> None:
        self.connection.close(1)

    def set_reading(self, reading: bool) -> None:
        """No more is under way than a simulated client sends."""
