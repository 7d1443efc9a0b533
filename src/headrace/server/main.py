"""The broker process: puts the parts together, serves until it is told to stop, stops cleanly.

The order of things is the point. The port is taken first, so that a second broker fails before it touches data; the
directory is locked; other nodes are listened to, so that a quorum can come about; this broker registers, and when it
has the metadata of its own registration takes up its partitions and opens their logs. Only then are clients served;
and `ready HOST:PORT` is printed when the controller has let it lead. On SIGTERM or SIGINT: what is led here is handed
over, no new connections, what is acknowledged is flushed, logs are closed clean. A second signal does not hurry it: a
clean stop is what makes the next start fast.
"""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.base.clock import SystemClock
from headrace.base.errors import KafkaError
from headrace.base.ids import ID_SIZE, format_id
from headrace.base.log import configure, get_logger
from headrace.base.settings import BrokerConfig, TopicConfig, broker_config
from headrace.cluster.control_messages import RegisterRequest
from headrace.cluster.image import ClusterImage
from headrace.cluster.registrant import Registrant
from headrace.consensus import metadata_log
from headrace.consensus.raft.messages import AnyMessage, encode_message, unwrap, wrap
from headrace.consensus.snapshots import SnapshotDamaged
from headrace.security.authorizer import AllowAll
from headrace.server.addresses import CannotServe, advertised_of, logged_voters_of, voters_of
from headrace.server.broker import Broker
from headrace.server.controller import Controller
from headrace.server.forwarding import Forwarding
from headrace.server.handlers import (
    acls,
    alter_partition,
    client_quotas,
    cluster,
    configs,
    connection,
    consumer_groups,
    group_offsets,
    groups,
    identities,
    log_dirs,
    offsets,
    partitions,
    quorum,
    topics,
    txn,
    txn_admin,
    txn_offsets,
)
from headrace.server.handlers.fetch import handle_fetch
from headrace.server.handlers.produce import handle_produce
from headrace.server.listener import Limits, Listener
from headrace.server.load import LoadMeter, Traffic
from headrace.server.member import Member
from headrace.server.metadata import MetadataStore
from headrace.server.peer_link import Address
from headrace.server.peers import Lane, Peers
from headrace.server.quorum import Quorum, raft_settings
from headrace.server.registration import Registration
from headrace.server.router import DirectHandler, Handler, Router
from headrace.server.session import Exchange
from headrace.storage.checkpoints import CorruptIdentity, MetaProperties
from headrace.storage.directories import DirectoryInUse
from headrace.storage.files import DiskFileSystem, FileSystem
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager
from headrace.storage.memory import MemoryFileSystem
from headrace.wire.apis import (
    PRIVATE_FORWARD,
    PRIVATE_HEARTBEAT,
    PRIVATE_LOADS,
    PRIVATE_RAFT,
    PRIVATE_REGISTER,
    Api,
)

HANDLERS: dict[Api, Handler] = {
    **connection.HANDLERS,
    **cluster.HANDLERS,
    **topics.HANDLERS,
    **configs.HANDLERS,
    **offsets.HANDLERS,
    **groups.HANDLERS,
    **consumer_groups.HANDLERS,
    **group_offsets.HANDLERS,
    **txn.HANDLERS,
    **txn_admin.HANDLERS,
    **acls.HANDLERS,
    **identities.HANDLERS,
    **client_quotas.HANDLERS,
    **log_dirs.HANDLERS,
    **txn_offsets.HANDLERS,
    **alter_partition.HANDLERS,
    **partitions.HANDLERS,
    **quorum.HANDLERS,
}
DIRECT: dict[Api, DirectHandler] = {
    Api.PRODUCE: handle_produce,
    Api.FETCH: handle_fetch,
    **group_offsets.DIRECT,
    **groups.DIRECT,
    **consumer_groups.DIRECT,
}

START_WAITED_FOR_S = 3.0
"""How long clients that come early wait for the logs to be open, before they are turned away."""
UNFENCED_WAITED_FOR_S = 0.5
"""How long after that they wait for the controller to count on this broker, before they are served all the same."""
LEAVE_TIMEOUT_S = 5.0
HEADLESS_S = 0.5
"""How long a broker that stops waits for a controller while there is none: all may be stopping."""
RESIGN_TIMEOUT_S = 1.0
LOOK_EVERY_S = 0.01

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `headrace serve` was asked for."""

    data_dir: str | None
    memory: bool = False
    host: str = "127.0.0.1"
    port: int = 9092
    settings: dict[str, str] = field(default_factory=dict)
    log_level: str = "WARNING"
    log_json: bool = False


def serve(options: ServeOptions) -> int:
    """Run a broker until it is told to stop; the exit status."""
    configure(options.log_level, as_json=options.log_json)
    _raise_file_limit()
    try:
        loop = _new_loop()
        try:
            return loop.run_until_complete(_serve(options, loop))
        finally:
            loop.close()
    except CannotServe as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


def _raise_file_limit() -> None:
    """Use all the file handles the system grants: the usual soft limit of 1024 would be few for a busy broker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(options: ServeOptions, loop: asyncio.AbstractEventLoop) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    config = _config(options)
    process = Process(options, config, loop, stopping.set)
    stopped = loop.create_task(stopping.wait())
    starting = loop.create_task(process.start())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            print(f"ready {options.host}:{process.port}", flush=True)
            await stopped
    finally:
        stopped.cancel()
        await process.stop()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    if process.failure is not None:
        raise CannotServe(process.failure)
    return 0


def _config(options: ServeOptions) -> BrokerConfig:
    settings = dict(options.settings)
    settings.setdefault("listeners", f"PLAINTEXT://{options.host}:{options.port}")
    if options.data_dir is not None:
        settings.setdefault("log.dirs", os.path.abspath(options.data_dir))
    try:
        return broker_config(settings)
    except KafkaError as error:
        raise CannotServe(error.message) from None


class Process:
    """The parts of a running broker, in the order they are started and the reverse in which they stop."""

    def __init__(
        self,
        options: ServeOptions,
        config: BrokerConfig,
        loop: asyncio.AbstractEventLoop,
        stop: Callable[[], None],
    ) -> None:
        """`stop` has the process stopped; `failure` then says why, if it was not asked to."""
        self._stop = stop
        self.failure: str | None = None
        self._options = options
        self._config = config
        self._loop = loop
        self._clock = SystemClock()
        self._listener: Listener | None = None
        self._logs: LogManager | None = None
        self._flusher: Flusher[PartitionLog] | None = None
        self._broker: Broker | None = None
        self._quorum: Quorum | None = None
        self._peers: Peers | None = None
        self._controller: Controller | None = None
        self._registration: Registration | None = None
        self._started = False
        self.port = options.port

    async def start(self) -> None:
        options, config = self._options, self._config
        traffic = Traffic()
        self._listener = Listener(self._loop, self._clock, _limits(config), AllowAll(), traffic)
        self.port = self._bind(self._listener)
        self._flusher = Flusher(self._loop, self._on_flushed)
        self._logs = logs = self._open_logs(self._flusher)
        host, port = advertised_of(config, options.host, self.port, socket.gethostname())
        voters = voters_of(config, host, port)
        directory = self._identify(logs, alone=list(voters) == [config.node_id])
        peers = self._peers = Peers(self._loop, self._clock, config.node_id, voters)
        store = self._open_metadata(logs, self._flusher, voters, peers)
        store.quorum.may_have_voted = directory is None
        cluster_id = "" if directory is None else directory.cluster_id
        broker = self._broker = Broker(
            config, self._clock, self._loop, logs, self._flusher, store, cluster_id
        )
        broker.on_config = self._take_limits
        controller = self._controller = Controller(
            self._loop,
            self._clock,
            store,
            peers,
            lambda: broker.config,
            lambda: cluster_id or format_id(os.urandom(ID_SIZE)),
        )
        forwarding = Forwarding(store, peers, HANDLERS, broker)
        identity = RegisterRequest(
            config.node_id, os.urandom(ID_SIZE), host, port, config.broker_rack, cluster_id
        )
        registration = self._registration = Registration(
            self._loop,
            self._clock,
            peers,
            store,
            Registrant(identity, list(voters), config.broker_heartbeat_interval_ms),
            controller,
        )
        broker.member = Member(store, peers, controller, forwarding, registration)
        broker.peers = peers
        registration.measure = LoadMeter(broker, traffic, peers, self._clock).measure
        broker.replication.connect(peers, broker.member)
        router = Router(
            broker,
            HANDLERS,
            DIRECT,
            broker.spawn,
            self._private(controller, forwarding, store, broker),
            forwarding,
        )
        router.hold()
        self._loop.call_later(START_WAITED_FOR_S, router.give_up)
        self._listen_to_each_other(store, peers, controller, registration, broker)
        self._listener.start(router.route)
        try:
            store.start()
        except SnapshotDamaged as error:
            raise CannotServe(
                f"{error}; restore the file from a backup of the data directory, or start on another with --data"
            ) from None
        except KafkaError as error:
            raise CannotServe(error.message) from None
        self._check_voters(store, logs, voters, cluster_id)
        if "broker" in config.process_roles:
            await registration.register()
            self._belong(logs, directory, registration.cluster_id)
            broker.cluster_id = registration.cluster_id
            await broker.start()
            self._loop.call_later(UNFENCED_WAITED_FOR_S, router.open)
            await registration.be_active()
            router.open()
        self._started = True
        gc.freeze()  # what lives now lives until the end: leave it out of every later collection

    def _open_metadata(
        self,
        logs: LogManager,
        flusher: Flusher[PartitionLog],
        voters: Mapping[int, Address],
        peers: Peers,
    ) -> MetadataStore:
        config = self._config

        def post(message: AnyMessage) -> None:
            payload = wrap(self._cluster_id(), encode_message(message))
            peers.link(message.to, Lane.RAFT).post(PRIVATE_RAFT, 0, payload)

        log = logs.create(metadata_log.TOPIC, metadata_log.PARTITION, metadata_log.TOPIC_ID, TopicConfig())
        self._quorum = Quorum(
            config.node_id,
            {node_id: f"{host}:{port}" for node_id, (host, port) in voters.items()},
            log,
            flusher,
            self._clock,
            self._loop,
            raft_settings(config.controller_quorum_election_timeout_ms),
            config.metadata_log_max_record_bytes_between_snapshots,
            post,
        )
        self._quorum.on_fatal = self._fail
        self._quorum.on_voters = lambda told: peers.set_voters(logged_voters_of(told))
        return MetadataStore(self._quorum)

    def _private(
        self, controller: Controller, forwarding: Forwarding, store: MetadataStore, broker: Broker
    ) -> dict[int, DirectHandler]:
        """What nodes say to each other."""

        def take_raft(_: object, exchange: Exchange, frame: memoryview, body: int) -> None:
            exchange.reply_nothing()
            cluster_id, message = unwrap(frame[body:])
            mine = self._cluster_id()
            if cluster_id and mine and cluster_id != mine:
                # Its log is another's: heard, it could be elected, and ours be cut.
                logger.warning(
                    "a node of another cluster is not heard",
                    extra={"fields": {"host": exchange.context.client_host, "cluster": cluster_id}},
                )
                return
            store.quorum.receive(message)

        def take_forwarded(_: object, exchange: Exchange, frame: memoryview, body: int) -> None:
            work = forwarding.serve(exchange, frame, body)
            if work is not None:
                broker.spawn(work)

        return {
            PRIVATE_RAFT: take_raft,
            PRIVATE_REGISTER: controller.handle_register,
            PRIVATE_HEARTBEAT: controller.handle_heartbeat,
            PRIVATE_FORWARD: take_forwarded,
            PRIVATE_LOADS: controller.handle_loads,
        }

    def _listen_to_each_other(
        self,
        store: MetadataStore,
        peers: Peers,
        controller: Controller,
        registration: Registration,
        broker: Broker,
    ) -> None:
        def changed(old: ClusterImage, new: ClusterImage) -> None:
            if old.brokers is not new.brokers:
                newer = [each.id for each in new.brokers.values() if 0 <= registration.epoch < each.epoch]
                peers.set_brokers({each.id: (each.host, each.port) for each in new.brokers.values()}, newer)
            controller.changed(old, new)
            broker.member.changed(old, new, self._clock.monotonic_ms())

        def down(node_id: int, gone: bool) -> None:
            if gone:
                store.quorum.gone(node_id)
                controller.gone(node_id)

        store.watchers.append(changed)
        store.on_active = controller.active
        store.on_applied = registration.applied
        registration.on_fatal = self._fail
        peers.on_down.append(down)
        peers.on_up.append(store.quorum.reached)

    def _cluster_id(self) -> str:
        """What this node's directory says, or has learned; empty before that."""
        return "" if self._broker is None else self._broker.cluster_id

    def _fail(self, why: str) -> None:
        """This process cannot go on."""
        if self.failure is None:
            self.failure = why
            logger.error("the broker stops", extra={"fields": {"why": why}})
            self._stop()

    def _take_limits(self, config: BrokerConfig) -> None:
        if self._listener is not None:
            self._listener.limits = _limits(config)

    def _on_flushed(self, log: PartitionLog) -> None:
        if self._broker is not None:
            self._broker.on_flushed(log)

    def _bind(self, listener: Listener) -> int:
        host, port = self._options.host, self._options.port
        try:
            return listener.bind(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CannotServe(
                    f"port {port} on {host} is in use; stop what listens there or choose another with --port"
                ) from None
            raise CannotServe(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
            ) from None

    def _open_logs(self, flusher: Flusher[PartitionLog]) -> LogManager:
        fs: FileSystem
        try:
            fs = (
                MemoryFileSystem()
                if self._options.data_dir is None
                else DiskFileSystem(self._options.data_dir)
            )
            logs = LogManager(fs, self._config.log_dirs[0], self._config, self._clock, flusher)
            logs.start()
            return logs
        except DirectoryInUse as error:
            raise CannotServe(str(error)) from None
        except (FileExistsError, NotADirectoryError):
            raise CannotServe(
                f"{self._options.data_dir} is not a directory; name one with --data, or a path where one can be made"
            ) from None
        except OSError as error:
            raise CannotServe(
                f"cannot use the data directory {self._options.data_dir}: {error.strerror}; "
                "choose another with --data or mend its permissions"
            ) from None

    def _identify(self, logs: LogManager, *, alone: bool) -> MetaProperties | None:
        """Whose directory this is. A new one is claimed at once for a new cluster of one, else when that is known."""
        node_id = self._config.node_id
        try:
            meta = logs.identity()
        except CorruptIdentity as error:
            raise CannotServe(
                f"{error}; mend meta.properties in the data directory or choose another"
            ) from None
        if meta is None:
            if alone:
                meta = MetaProperties(format_id(os.urandom(ID_SIZE)), node_id, format_id(os.urandom(ID_SIZE)))
                logs.claim(meta)
        elif meta.node_id != node_id:
            raise CannotServe(
                f"the data directory {logs.data_dir} belongs to node {meta.node_id}, this is node {node_id}; "
                f"start it with --set node.id={meta.node_id} or choose another directory with --data"
            )
        return meta

    def _check_voters(
        self, store: MetadataStore, logs: LogManager, voters: Mapping[int, Address], cluster_id: str
    ) -> None:
        """A directory of a cluster of one elects its node at once, whoever else is told to vote: two would lead.

        Not if all of them are brokers of that very cluster, who were left without a vote: they follow this node.
        """
        node = store.quorum.node
        if node is None or not node.log.end or set(node.voters) != {node.id}:
            return
        if len(voters) > 1 and not voters.keys() <= store.image_of_all().brokers.keys():
            raise CannotServe(
                f"the data directory {logs.data_dir} belongs to a cluster of its own, {cluster_id}, in which node "
                f"{node.id} votes alone; choose another with --data, or leave out controller.quorum.voters"
            )

    def _belong(self, logs: LogManager, directory: MetaProperties | None, cluster_id: str) -> None:
        """Write down which cluster a new directory belongs to."""
        if directory is None:
            logs.claim(MetaProperties(cluster_id, self._config.node_id, format_id(os.urandom(ID_SIZE))))

    async def stop(self) -> None:
        if self._started and self.failure is None:
            await self._hand_over()
        if self._listener is not None:
            self._listener.stop_accepting()
        if self._registration is not None:
            self._registration.close()
        if self._controller is not None:
            self._controller.close()
        if self._broker is not None:
            await self._broker.stop()
        if self._quorum is not None:
            self._quorum.close()
        if self._peers is not None:
            self._peers.close()
        if self._flusher is not None:
            self._flusher.close()
        if self._listener is not None:
            self._listener.close()
        if self._logs is not None:
            self._logs.close()

    async def _hand_over(self) -> None:
        """Let others lead what is led here, and control what is controlled here, before anyone notices a stop."""
        broker, quorum, registration = self._broker, self._quorum, self._registration
        assert broker is not None and quorum is not None and registration is not None
        others = [
            each for each in broker.image.brokers.values() if each.id != broker.node_id and each.may_lead
        ]
        if others and self._config.controlled_shutdown_enable and "broker" in self._config.process_roles:
            leaving = self._loop.create_task(registration.leave())
            headless = 0
            for _ in range(int(LEAVE_TIMEOUT_S / LOOK_EVERY_S)):
                headless = 0 if quorum.leader is not None else headless + 1
                if leaving.done() or headless * LOOK_EVERY_S > HEADLESS_S:
                    break
                await asyncio.wait((leaving,), timeout=LOOK_EVERY_S)
            if not leaving.done():
                leaving.cancel()
                logger.warning("what this broker leads could not be handed over: no controller answers")
        looks = int(RESIGN_TIMEOUT_S / LOOK_EVERY_S) if quorum.resign() else 0
        while quorum.is_active and others and looks:
            looks -= 1
            await asyncio.sleep(LOOK_EVERY_S)


def _limits(config: BrokerConfig) -> Limits:
    return Limits(
        frame_bytes_max=config.socket_request_max_bytes,
        connections_max=config.max_connections,
        connections_per_ip_max=config.max_connections_per_ip,
        queued_bytes_max=config.queued_max_request_bytes,
        idle_ms_max=config.connections_max_idle_ms,
    )
