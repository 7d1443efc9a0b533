"""The broker process: puts the parts together, serves until it is told to stop, stops cleanly.

The order of things is the point. The port is taken first, so that a second broker fails before it touches data; the
directory is locked and its logs recovered; the metadata log is read and partitions taken up; only then are
connections accepted and `ready HOST:PORT` printed. On SIGTERM or SIGINT: no new connections, what is acknowledged is
flushed, logs are closed clean. A second signal does not hurry it: a clean stop is what makes the next start fast.
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
from dataclasses import dataclass, field

from headrace.base.clock import SystemClock
from headrace.base.errors import KafkaError
from headrace.base.ids import ID_SIZE, format_id
from headrace.base.log import configure, get_logger
from headrace.base.settings import BrokerConfig, TopicConfig, broker_config
from headrace.consensus import metadata_log
from headrace.consensus.metadata_log import MetadataLog
from headrace.consensus.snapshots import SnapshotDamaged
from headrace.security.authorizer import AllowAll
from headrace.security.quotas import NoQuotas
from headrace.server.broker import Broker
from headrace.server.handlers import (
    cluster,
    configs,
    connection,
    consumer_groups,
    group_offsets,
    groups,
    offsets,
    topics,
    txn,
    txn_admin,
    txn_offsets,
)
from headrace.server.handlers.fetch import handle_fetch
from headrace.server.handlers.produce import handle_produce
from headrace.server.listener import Limits, Listener
from headrace.server.metadata import MetadataStore
from headrace.server.router import DirectHandler, Handler, Router
from headrace.storage.checkpoints import CorruptIdentity, MetaProperties
from headrace.storage.directories import DirectoryInUse
from headrace.storage.files import DiskFileSystem, FileSystem
from headrace.storage.flusher import Flusher
from headrace.storage.log import PartitionLog
from headrace.storage.manager import LogManager
from headrace.storage.memory import MemoryFileSystem
from headrace.wire.apis import Api

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
    **txn_offsets.HANDLERS,
}
WILDCARDS = ("", "0.0.0.0", "::")
DIRECT: dict[Api, DirectHandler] = {Api.PRODUCE: handle_produce, Api.FETCH: handle_fetch}

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


class CannotServe(Exception):
    """Why the broker cannot start, with what to do about it."""


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
    process = Process(options, config, loop)
    try:
        await process.start()
        print(f"ready {options.host}:{process.port}", flush=True)
        await stopping.wait()
    finally:
        await process.stop()
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

    def __init__(self, options: ServeOptions, config: BrokerConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._config = config
        self._loop = loop
        self._clock = SystemClock()
        self._listener: Listener | None = None
        self._logs: LogManager | None = None
        self._flusher: Flusher[PartitionLog] | None = None
        self._broker: Broker | None = None
        self.port = options.port

    async def start(self) -> None:
        options, config = self._options, self._config
        router: Router | None = None

        def route(exchange: object, frame: memoryview, body: int) -> None:
            assert router is not None
            router.route(exchange, frame, body)  # type: ignore[arg-type]

        self._listener = Listener(self._loop, self._clock, _limits(config), route, AllowAll(), NoQuotas())
        self.port = self._bind(self._listener)
        self._flusher = Flusher(self._loop, self._on_flushed)
        self._logs = self._open_logs(self._flusher)
        cluster_id = self._identify(self._logs)
        log = self._logs.create(
            metadata_log.TOPIC, metadata_log.PARTITION, metadata_log.TOPIC_ID, TopicConfig()
        )
        store = MetadataStore(
            MetadataLog(log, self._flusher, config.metadata_log_max_record_bytes_between_snapshots),
            self._clock,
        )
        self._broker = Broker(config, self._clock, self._loop, self._logs, self._flusher, store, cluster_id)
        self._broker.on_config = self._take_limits
        router = Router(self._broker, HANDLERS, DIRECT, self._broker.spawn)
        host, port = _advertised(config, options.host, self.port)
        try:
            await self._broker.start(host, port)
        except SnapshotDamaged as error:
            raise CannotServe(
                f"{error}; restore the file from a backup of the data directory, or start on another with --data"
            ) from None
        gc.freeze()  # what lives now lives until the end: leave it out of every later collection
        self._listener.start()

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

    def _identify(self, logs: LogManager) -> str:
        """The cluster's id: what the directory says, or a new one for a new directory."""
        node_id = self._config.node_id
        try:
            meta = logs.identity()
        except CorruptIdentity as error:
            raise CannotServe(
                f"{error}; mend meta.properties in the data directory or choose another"
            ) from None
        if meta is None:
            meta = MetaProperties(format_id(os.urandom(ID_SIZE)), node_id, format_id(os.urandom(ID_SIZE)))
            logs.claim(meta)
        elif meta.node_id != node_id:
            raise CannotServe(
                f"the data directory {logs.data_dir} belongs to node {meta.node_id}, this is node {node_id}; "
                f"start it with --set node.id={meta.node_id} or choose another directory with --data"
            )
        return meta.cluster_id

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.stop_accepting()
        if self._broker is not None:
            await self._broker.stop()
        if self._flusher is not None:
            self._flusher.close()
        if self._listener is not None:
            self._listener.close()
        if self._logs is not None:
            self._logs.close()


def _limits(config: BrokerConfig) -> Limits:
    return Limits(
        frame_bytes_max=config.socket_request_max_bytes,
        connections_max=config.max_connections,
        connections_per_ip_max=config.max_connections_per_ip,
        queued_bytes_max=config.queued_max_request_bytes,
        idle_ms_max=config.connections_max_idle_ms,
    )


def _advertised(config: BrokerConfig, host: str, port: int) -> tuple[str, int]:
    """Where clients are told to connect: `advertised.listeners` if set, else where the broker listens.

    A broker that listens on every address tells its host's name: no client can connect to "every address".
    """
    if not config.advertised_listeners:
        return (socket.gethostname() if host in WILDCARDS else host), port
    address = config.advertised_listeners[0].rpartition("://")[2]
    name, _, number = address.rpartition(":")
    if not number.isdigit():
        raise CannotServe(
            f"advertised.listeners {config.advertised_listeners[0]!r} should read PLAINTEXT://host:port"
        )
    return name.strip("[]"), int(number)
