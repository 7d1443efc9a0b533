"""A cluster of real brokers, owned by a test.

Owns the processes, their ports, their directories and, when cables are wanted, the proxies between them. Invariants:
`start` returns only when every broker is in service; ports and directories stay the same over kills and restarts; no
broker outlives the process that started it. Called by `headrace.testing.plugin`, by the project's own tests and by
people's.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from headrace.testing.broker import Broker, BrokerFailed
from headrace.testing.ports import free_ports
from headrace.testing.proxy import CLIENTS, Cables

CONTROLLERS_MAX = 3
START_TIMEOUT_S = 60.0
START_ATTEMPTS_MAX = 3
HEALTHY_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05
HOST = "127.0.0.1"


class Cluster:
    """Real Headrace brokers, numbered from 1; the first three are also controllers.

    >>> with Cluster(3) as cluster:
    ...     cluster.create_topic("orders", partitions=3, replication_factor=3)
    ...     cluster.broker(cluster.leader("orders", 0)).kill()

    `settings` go to every broker. With `cables=True` everything between brokers, and between clients and brokers, goes
    through proxies that `isolate` and `cut` can interrupt.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        settings: Mapping[str, object] | None = None,
        each: Callable[[int], Mapping[str, object]] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        cables: bool = False,
        log_level: str = "INFO",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._count = brokers
        self._settings = dict(settings or {})
        self._each = each or (lambda number: {})
        self._own_dir = None if data_dir is not None else tempfile.mkdtemp(prefix="headrace-test-")
        self.data_dir = os.fspath(data_dir) if data_dir is not None else str(self._own_dir)
        self._with_cables = cables
        self._log_level = log_level
        self._env = env
        self._cables: Cables | None = None
        self._ports: dict[int, int] = {}
        self.brokers: dict[int, Broker] = {}

    # -- what a test asks --------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """All brokers, for `bootstrap.servers`."""
        return ",".join(f"{HOST}:{port}" for port in self._ports.values())

    @property
    def ids(self) -> list[int]:
        """The numbers of the brokers."""
        return list(range(1, self._count + 1))

    def broker(self, number: int) -> Broker:
        """One broker: `kill()`, `pause()`, `resume()`, `stop()`, `start()`, `restart()`, `log()`."""
        return self.brokers[number]

    def log(self, tail_bytes: int | None = None) -> str:
        """What all brokers wrote to standard error."""
        share = None if tail_bytes is None else max(1, tail_bytes // self._count)
        return "\n".join(f"--- broker {n} ---\n{b.log(share)}" for n, b in self.brokers.items())

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic, by default with three replicas (fewer on fewer brokers), and wait for its leaders."""
        from headrace.testing.topics import create_topic

        factor = replication_factor or min(3, self._count)
        create_topic(self.bootstrap, name, partitions, factor, config or {})

    def leader(self, topic: str, partition: int = 0) -> int:
        """The broker that leads a partition now; waits for one while there is none."""
        from headrace.testing.topics import describe_topic

        deadline_s = time.monotonic() + HEALTHY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            info = describe_topic(self.bootstrap, topic).partitions.get(partition)
            if info is not None and info.leader >= 0:
                return info.leader
            time.sleep(LOOK_EVERY_S)
        raise BrokerFailed(f"{topic}-{partition} has no leader after {HEALTHY_TIMEOUT_S} s")

    def await_in_sync(self, topic: str, timeout_s: float = HEALTHY_TIMEOUT_S) -> None:
        """Return when every replica of every partition of a topic is in sync."""
        from headrace.testing.topics import describe_topic

        deadline_s = time.monotonic() + timeout_s
        while True:
            parts = describe_topic(self.bootstrap, topic).partitions.values()
            if parts and all(p.leader >= 0 and set(p.isr) == set(p.replicas) for p in parts):
                return
            if time.monotonic() > deadline_s:
                raise BrokerFailed(f"replicas of {topic} are not in sync after {timeout_s} s: {list(parts)}")
            time.sleep(LOOK_EVERY_S)

    # -- cables ------------------------------------------------------------------------------------------------------

    def isolate(self, number: int, *, clients: bool = True) -> None:
        """Cut one broker off from the others, silently; from clients too unless told otherwise."""
        others = [other for other in self.ids if other != number] + ([CLIENTS] if clients else [])
        self._wired().cut([pair for other in others for pair in ((number, other), (other, number))])

    def split(self, one_side: Iterable[int], *, clients: bool = False) -> None:
        """Cut a group of brokers off from all others; with `clients`, from those too."""
        side = set(one_side)
        others = [other for other in self.ids if other not in side] + ([CLIENTS] if clients else [])
        self._wired().cut([pair for a in side for b in others for pair in ((a, b), (b, a))])

    def cut(self, sender: int, receiver: int) -> None:
        """Hold what one broker sends to another; the other way stays open."""
        self._wired().cut([(sender, receiver)])

    def heal(self) -> None:
        """Mend every cable."""
        self._wired().mend()

    def _wired(self) -> Cables:
        if self._cables is None:
            raise ValueError("this cluster has no cables: make it with cables=True")
        return self._cables

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> "Cluster":
        """Start every broker that does not run, side by side; return when all are in service."""
        if self.brokers:
            self._start_all()
            return self
        for attempt in range(START_ATTEMPTS_MAX):
            self._wire()
            try:
                self._start_all()
                break
            except BrokerFailed as error:
                # Another process may take a port between the look and the bind. Then choose all of them again.
                if "in use" not in str(error) or attempt == START_ATTEMPTS_MAX - 1:
                    raise
                self._unwire()
                shutil.rmtree(self.data_dir, ignore_errors=True)
        return self

    def _wire(self) -> None:
        ports = free_ports(self._count * (2 if self._with_cables else 1), HOST)
        self._ports = dict(zip(self.ids, ports))
        listening = dict(zip(self.ids, ports[self._count :])) if self._with_cables else self._ports
        if self._with_cables:
            self._cables = Cables(self._ports, listening, HOST)
        voters = ",".join(f"{n}@{HOST}:{self._ports[n]}" for n in self.ids[:CONTROLLERS_MAX])
        for number in self.ids:
            own: dict[str, object] = {"node.id": number}
            if self._count > 1:
                own["controller.quorum.voters"] = voters
            if self._with_cables:
                own["advertised.listeners"] = f"PLAINTEXT://{HOST}:{self._ports[number]}"
            self.brokers[number] = Broker(
                data_dir=os.path.join(self.data_dir, f"broker-{number}"),
                settings={**self._settings, **self._each(number), **own},
                port=listening[number],
                log_level=self._log_level,
                env=self._env,
                start_timeout_s=START_TIMEOUT_S,
            )

    def _unwire(self) -> None:
        for broker in self.brokers.values():
            broker.kill()
        self.brokers.clear()
        if self._cables is not None:
            self._cables.close()
            self._cables = None

    def _start_all(self) -> None:
        # Each waits for a majority of controllers before it is ready, so none may wait for another's start.
        with ThreadPoolExecutor(self._count) as pool:
            for started in [pool.submit(broker.start) for broker in self.brokers.values()]:
                started.result()

    def kill_all(self) -> None:
        """End every broker at once."""
        for broker in self.brokers.values():
            broker.kill()

    def stop(self) -> None:
        """Stop every broker cleanly, all at once. Raises BrokerFailed when one does not end well."""
        running = [broker for broker in self.brokers.values() if broker.running]
        if not running:
            return
        with ThreadPoolExecutor(len(running)) as pool:
            for stopped in [pool.submit(broker.stop) for broker in running]:
                stopped.result()

    def close(self) -> None:
        """Stop everything and remove what was made."""
        try:
            if self._cables is not None:
                self._cables.mend()
            self.stop()
        finally:
            self.kill_all()
            for broker in self.brokers.values():
                broker.close()
            if self._cables is not None:
                self._cables.close()
            if self._own_dir is not None:
                shutil.rmtree(self._own_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._unwire()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BrokerFailed:
            # The test's own error matters more than how a broker ended.
            if error is None:
                raise
