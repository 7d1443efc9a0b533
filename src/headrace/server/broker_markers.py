"""Markers on their way from the transaction coordinator of this broker into partitions, here and on other brokers.

Owns nothing that would be missed: which partitions lack a marker is the coordinator's to know and to ask again for.
Invariants: whatever is sent is answered once, by the leader or by an error; a marker is told as written when it is
committed in its partition. Used by the transaction coordinator and by the handler of WriteTxnMarkers.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from headrace.base.errors import ErrorCode, KafkaError
from headrace.cluster.names import CONSUMER_OFFSETS_TOPIC
from headrace.coordinators.txn_metadata import Partition as Where
from headrace.coordinators.txn_shard import Markers
from headrace.records.batch import parse_header
from headrace.replication.partition import Partition
from headrace.server.peers import Lane
from headrace.storage.hanging import abort_older
from headrace.storage.markers import EndTransactionMarker, marker_batch
from headrace.storage.producer_state import TRANSACTION_VERSION_2
from headrace.wire.apis import Api
from headrace.wire.messages import Message

if TYPE_CHECKING:
    from headrace.server.broker import Broker

Done: TypeAlias = Callable[[ErrorCode], None]
Results: TypeAlias = list[tuple[Where, ErrorCode]]

MARKERS_VERSION = 2
REQUEST_TIMEOUT_MS = 30_000


class MarkerWrite(NamedTuple):
    """A marker for one partition that this broker leads."""

    topic: str
    partition: int
    producer: tuple[int, int]
    marker: EndTransactionMarker
    transaction_version: int


def write_marker(broker: "Broker", wanted: MarkerWrite, done: Done) -> None:
    """End the producer's transaction in a partition; told when the marker is committed."""
    topic, index, producer, marker, transaction_version = wanted
    try:
        partition = broker.partition(topic, index)
        partition.check_min_insync()
        batch = marker_batch(producer, marker, broker.clock.now_ms())
        partition.log.producer_state.check_marker(
            parse_header(batch), marker, transaction_version=transaction_version
        )
        if marker.committed:
            # What an older epoch left open is not part of what is committed.
            opened_by = producer[1] - 1 if transaction_version >= TRANSACTION_VERSION_2 else producer[1]
            abort_older(partition.log, producer[0], opened_by, partition.leader_epoch, broker.clock.now_ms())
        if topic == CONSUMER_OFFSETS_TOPIC:
            broker.groups.append_marker(index, batch, producer[0], marker, done)
        else:
            _append(broker, partition, batch, done)
    except KafkaError as error:
        done(error.code)


async def write_markers(broker: "Broker", wanted: Sequence[MarkerWrite]) -> list[ErrorCode]:
    """Write markers and wait until each is committed or refused; the outcomes in their order."""
    outcomes = [ErrorCode.NONE] * len(wanted)
    left = len(wanted)
    all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(number: int, error: ErrorCode) -> None:
        nonlocal left
        outcomes[number] = error
        left -= 1
        if not left and not all_done.done():
            all_done.set_result(None)

    for number, each in enumerate(wanted):
        write_marker(broker, each, partial(done, number))
    if wanted:
        await all_done
    return outcomes


def _append(broker: "Broker", partition: Partition, batch: bytes, done: Done) -> None:
    appended = partition.append_from_coordinator(batch, broker.clock.now_ms())
    end = appended.last_offset + 1
    if appended.flush_due:
        broker.flush(partition)
    if partition.is_safe(end, appended.flush_due, True):
        done(ErrorCode.NONE)
    else:
        partition.when_safe(end, appended.flush_due, True, done)


class MarkerSender:
    """Brings each marker to who leads its partition."""

    def __init__(self, broker: "Broker", answer: Callable[[Markers, Results], None]) -> None:
        self._broker = broker
        self._answer = answer

    def send(self, markers: Markers, coordinator_epoch: int) -> None:
        """Write markers, or have them written. Results come by and by, for each partition once."""
        elsewhere: dict[int, list[Where]] = {}
        here: list[Where] = []
        settled: Results = []
        topics = self._broker.image.topics
        for where in markers.partitions:
            topic = topics.get(where[0])
            if topic is None or where[1] >= len(topic.partitions):
                settled.append((where, ErrorCode.NONE))  # deleted: there is nothing left to decide
                continue
            leader = topic.partitions[where[1]].leader
            if leader == self._broker.node_id:
                here.append(where)
            elif leader < 0:
                settled.append((where, ErrorCode.LEADER_NOT_AVAILABLE))
            else:
                elsewhere.setdefault(leader, []).append(where)
        for leader, partitions in elsewhere.items():
            self._send_to(leader, markers, partitions, coordinator_epoch)
        if settled:
            self._answer(markers, settled)
        self._write_here(markers, here, coordinator_epoch)

    def _write_here(self, markers: Markers, partitions: Sequence[Where], coordinator_epoch: int) -> None:
        left = len(partitions)
        results: Results = []

        def written(where: Where, error: ErrorCode) -> None:
            nonlocal left
            left -= 1
            results.append((where, error))
            if not left:
                self._answer(markers, results)

        marker = EndTransactionMarker(markers.committed, coordinator_epoch)
        for where in partitions:
            wanted = MarkerWrite(*where, (markers.producer_id, markers.epoch), marker, markers.client_version)
            write_marker(self._broker, wanted, partial(written, where))

    def _send_to(
        self, leader: int, markers: Markers, partitions: Sequence[Where], coordinator_epoch: int
    ) -> None:
        topics: dict[str, list[int]] = {}
        for topic, index in partitions:
            topics.setdefault(topic, []).append(index)
        body = {
            "markers": [
                {
                    "producer_id": markers.producer_id,
                    "producer_epoch": markers.epoch,
                    "transaction_result": markers.committed,
                    "topics": [
                        {"name": name, "partition_indexes": indexes} for name, indexes in topics.items()
                    ],
                    "coordinator_epoch": coordinator_epoch,
                    "transaction_version": markers.client_version,
                }
            ]
        }

        def done(reply: Message | KafkaError) -> None:
            if isinstance(reply, KafkaError):
                told = dict.fromkeys(partitions, reply.code)
            else:
                told = dict.fromkeys(partitions, ErrorCode.UNKNOWN_SERVER_ERROR)
                for marker in reply.markers:
                    for topic in marker.topics:
                        for each in topic.partitions:
                            told[topic.name, each.partition_index] = ErrorCode(each.error_code)
            self._answer(markers, list(told.items()))

        ask_peer(self._broker, leader, Api.WRITE_TXN_MARKERS, MARKERS_VERSION, body, done)


def ask_peer(
    broker: "Broker",
    node_id: int,
    api: Api,
    version: int,
    body: dict[str, Any],
    done: "Callable[[Message | KafkaError], None]",
) -> None:
    """Ask another broker; `done` is called once, with its reply or the error that there will be none for."""
    if broker.peers is None:
        done(KafkaError(ErrorCode.NETWORK_EXCEPTION, "this broker has no links to others"))
        return
    asked = broker.peers.link(node_id, Lane.COORDINATE).request(api, version, body, REQUEST_TIMEOUT_MS)

    def replied(future: "asyncio.Future[Message]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or (error is not None and not isinstance(error, KafkaError)):
            done(KafkaError(ErrorCode.NETWORK_EXCEPTION, "the link was closed"))
        else:
            done(error if isinstance(error, KafkaError) else future.result())

    asked.add_done_callback(replied)
