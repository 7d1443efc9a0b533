"""Transactions in a simulated cluster: producers that share a transactional id, and readers of what is committed.

In some seeds two clients write in transactions under one id, so that each fences the other whenever it begins. They
speak as clients of transaction.version 0 or 2 do, over the simulated network, and try again what may be tried again.
A reader follows each partition with read_committed. `TxnAccount` knows what each transaction wrote and what its
producer was told, and holds:

- nothing is read twice, nothing of a transaction that its producer has aborted or never asked to commit;
- once faults stop, each transaction is read whole or not at all, whole if its producer was told that it is committed,
  in the order in which it was written; and nothing holds readers back.

Made by the scenario.
"""

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.builder import build_batch, iter_batches, iter_records
from headrace.storage.markers import parse_marker
from headrace.wire.apis import Api
from tests.sim.cluster_clients import BACKOFF, SimClient
from tests.sim.cluster_loop import WALL_MS
from tests.sim.cluster_oracle import Key
from tests.sim.kernel import MS
from tests.sim.raft_oracle import Violation

SHARE = 0.15  # of the seeds have transactions
TXN_ID = "x"
TIMEOUT_MS = 1_500
PAUSE = 250 * MS
TXN_KEY = 1
READ_COMMITTED = 1
FIND_VERSION, INIT_VERSION, ADD_VERSION, FETCH_VERSION = 4, 4, 3, 12
PRODUCE_VERSIONS = {0: 11, 2: 12}
END_VERSIONS = {0: 3, 2: 5}
FINAL = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        ErrorCode.UNKNOWN_PRODUCER_ID,
        ErrorCode.OPERATION_NOT_ATTEMPTED,
    }
)
"""What a producer does not get over but by beginning anew. Anything else is tried again."""

Steps = Generator[tuple[int, Api, int, Mapping[str, Any]] | None, Any, Any]
"""Requests to nodes, resumed with their replies; None is a pause."""


@dataclass
class Txn:
    """What one transaction wrote, by partition, and what is known of its end."""

    name: str
    writes: dict[Key, list[bytes]] = field(default_factory=dict)
    asked_commit: bool = False
    outcome: str = ""

    def wrote(self) -> set[bytes]:
        return {value for values in self.writes.values() for value in values}


class TxnAccount:
    """Every transaction, and everything that was read."""

    def __init__(self) -> None:
        self.txns: list[Txn] = []
        self.by_value: dict[bytes, Txn] = {}
        self.seen: dict[Key, list[bytes]] = {}
        self._ever: set[bytes] = set()

    @property
    def committed(self) -> int:
        return sum([txn.outcome == "commit" for txn in self.txns])

    def wrote(self, txn: Txn, key: Key, value: bytes) -> None:
        txn.writes.setdefault(key, []).append(value)
        self.by_value[value] = txn

    def was_read(self, key: Key, value: bytes) -> None:
        txn = self.by_value[value]
        if value in self._ever:
            raise Violation(f"{value!r} is read twice")
        if txn.outcome == "abort" or not txn.asked_commit:
            raise Violation(f"{value!r} is read, and {txn.name} was {txn.outcome or 'not asked to commit'}")
        self._ever.add(value)
        self.seen.setdefault(key, []).append(value)

    def check_end(self) -> None:
        for txn in self.txns:
            wrote = txn.wrote()
            read = wrote & self._ever
            if read and read != wrote:
                raise Violation(f"{txn.name} is seen in part: {sorted(read)} of {sorted(wrote)}")
            if txn.outcome == "commit" and read != wrote:
                raise Violation(f"{txn.name} was committed, and {sorted(wrote - read)} is not seen")
            for key, values in txn.writes.items():
                if read and [value for value in self.seen.get(key, ()) if value in wrote] != values:
                    raise Violation(f"{txn.name} is seen out of order in {key}")


class SimTxnProducer(SimClient):
    """Writes one transaction after the other; begins anew when it is fenced or dies."""

    def __init__(self, *args: Any, account: TxnAccount, keys: list[Key], version: int, gap: int) -> None:
        super().__init__(*args)
        self.account = account
        self.keys = keys
        self.version = version
        self.gap = gap
        self.stopping = False
        self.idle = False
        self._coordinator: int | None = None
        self._life = 0
        self._count = 0
        self.begin()

    def begin(self) -> None:
        """A process that knows nothing of the one before."""
        self._life += 1
        steps = self._run()
        self.kernel.after(1 + self.random.randrange(PAUSE), self._resume, steps, self._life, None)

    def _resume(self, steps: Steps, life: int, reply: Any) -> None:
        if life != self._life:
            return
        try:
            wanted = steps.send(reply)
        except StopIteration:
            self.idle = True
            return
        if wanted is None:
            self.kernel.after(BACKOFF // 2 + self.random.randrange(BACKOFF), self._resume, steps, life, None)
        else:
            self.request(*wanted, lambda answer: self._resume(steps, life, answer))

    def _run(self) -> Steps:
        while not self.stopping:
            producer = yield from self._initialize()
            sequences: dict[Key, int] = {}
            while producer is not None and not self.stopping:
                after = yield from self._transaction(producer, sequences)
                if after != producer:
                    sequences = {}
                producer = after
                for _ in range(self.random.randrange(self.gap)):
                    yield None
            for _ in range(self.random.randrange(8)):
                yield None

    def _coordinated(
        self, api: Api, version: int, body: Mapping[str, Any], error_of: Callable[[Any], int]
    ) -> Steps:
        """Ask whoever coordinates until there is an answer that is none of 'try again'."""
        while True:
            if self._coordinator is None:
                wanted = {"key_type": TXN_KEY, "coordinator_keys": [TXN_ID]}
                found = yield self.any_node(), Api.FIND_COORDINATOR, FIND_VERSION, wanted
                if found is None or found.coordinators[0].error_code:
                    yield None
                    continue
                self._coordinator = found.coordinators[0].node_id
            reply = yield self._coordinator, api, version, body
            error = None if reply is None else error_of(reply)
            if error == ErrorCode.NONE or error in FINAL:
                return reply
            if error in (None, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE):
                self._coordinator = None
            yield None

    def _initialize(self) -> Steps:
        body = {
            "transactional_id": TXN_ID,
            "transaction_timeout_ms": TIMEOUT_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        reply = yield from self._coordinated(
            Api.INIT_PRODUCER_ID, INIT_VERSION, body, lambda reply: reply.error_code
        )
        return None if reply.error_code else (reply.producer_id, reply.producer_epoch)

    def _transaction(self, producer: tuple[int, int], sequences: dict[Key, int]) -> Steps:
        """Write and end one; who writes the next, or None when it has to begin anew."""
        self._count += 1
        txn = Txn(f"{self.id}.{self._count}")
        self.account.txns.append(txn)
        keys = self.random.sample(self.keys, self.random.randint(1, len(self.keys)))
        who = {"transactional_id": TXN_ID, "producer_id": producer[0], "producer_epoch": producer[1]}
        if self.version == 0:
            added = {f"v3_and_below_{name}": value for name, value in who.items()}
            partitions = [index for _, index in keys]
            added["v3_and_below_topics"] = [{"name": keys[0][0], "partitions": partitions}]
            reply = yield from self._coordinated(Api.ADD_PARTITIONS_TO_TXN, ADD_VERSION, added, _added_error)
            if _added_error(reply):
                return None
        for key in keys * self.random.randint(1, 2):
            if not (yield from self._write(txn, key, producer, sequences)):
                return None
        committing = self.random.random() < 0.7
        txn.asked_commit = committing
        reply = yield from self._coordinated(
            Api.END_TXN,
            END_VERSIONS[self.version],
            {**who, "committed": committing},
            lambda reply: reply.error_code,
        )
        if self.kernel.tracing:
            self.kernel.trace(
                f"client {self.id}: {txn.name} {committing}: {ErrorCode(reply.error_code).name}"
            )
        if reply.error_code:
            return None
        txn.outcome = "commit" if committing else "abort"
        return producer if self.version == 0 else (reply.producer_id, reply.producer_epoch)

    def _write(self, txn: Txn, key: Key, producer: tuple[int, int], sequences: dict[Key, int]) -> Steps:
        """Have a record appended; False when this producer is done for."""
        value = f"x{txn.name}/{key[1]}/{len(txn.writes.get(key, ()))}".encode()
        self.account.wrote(txn, key, value)
        sequence = sequences.get(key, 0)
        batch = build_batch(
            [(WALL_MS + self.kernel.now // MS, None, value, ())],
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=sequence,
            transactional=True,
        )
        body = {
            "transactional_id": TXN_ID,
            "acks": -1,
            "timeout_ms": 1_000,
            "topic_data": [{"name": key[0], "partition_data": [{"index": key[1], "records": batch}]}],
        }
        while True:
            leader = self.leaders.get(key)
            if leader is None:
                self.refresh(key[0])
                yield None
                continue
            reply = yield leader[0], Api.PRODUCE, PRODUCE_VERSIONS[self.version], body
            error = None if reply is None else reply.responses[0].partition_responses[0].error_code
            if self.kernel.tracing:
                self.kernel.trace(f"client {self.id}: {value!r} {producer}: {error}")
            if error in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                sequences[key] = sequence + 1
                return True
            if error in FINAL:
                return False
            self.refresh(key[0])
            yield None


class SimTxnReader(SimClient):
    """Reads what is committed of one partition, and leaves out what is aborted, as clients do."""

    def __init__(self, *args: Any, account: TxnAccount, key: Key) -> None:
        super().__init__(*args)
        self.account = account
        self.key = key
        self.position = 0
        self.kernel.after(1 + self.random.randrange(PAUSE), self.step)

    def _again(self) -> None:
        self.refresh(self.key[0])
        self.kernel.after(BACKOFF + self.random.randrange(BACKOFF), self.step)

    def step(self) -> None:
        leader = self.leaders.get(self.key)
        if leader is None:
            self._again()
            return
        wanted = {
            "partition": self.key[1],
            "current_leader_epoch": leader[1],
            "fetch_offset": self.position,
            "partition_max_bytes": 2_000,
        }
        body = {
            "replica_id": -1,
            "max_wait_ms": 200,
            "min_bytes": 1,
            "max_bytes": 10_000,
            "isolation_level": READ_COMMITTED,
            "session_epoch": -1,
            "topics": [{"topic": self.key[0], "partitions": [wanted]}],
        }
        self.request(leader[0], Api.FETCH, FETCH_VERSION, body, self._fetched)

    def _fetched(self, reply: Any) -> None:
        if reply is None or reply.error_code or reply.responses[0].partitions[0].error_code:
            self._again()
            return
        result = reply.responses[0].partitions[0]
        aborted = sorted(
            [(each.first_offset, each.producer_id) for each in result.aborted_transactions or ()]
        )
        try:
            batches = list(iter_batches(result.records or b""))
        except KafkaError:
            self._again()  # damaged
            return
        aborting: set[int] = set()
        for header, batch in batches:
            while aborted and aborted[0][0] <= header.last_offset:
                aborting.add(aborted.pop(0)[1])
            if header.is_control:
                for record in iter_records(batch):
                    marker = parse_marker(record.key or b"", record.value)
                    if marker is not None and not marker.committed:
                        aborting.discard(header.producer_id)
            elif header.is_transactional and header.producer_id not in aborting:
                for record in iter_records(batch):
                    if record.offset >= self.position:
                        self.account.was_read(self.key, record.value or b"")
            self.position = max(self.position, header.next_offset)
        self.kernel.after(MS, self.step)


class Transactions:
    """The transactions of a seed, if it has any."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"transactions {seed}")  # its own, so that other seeds stay what they were
        self.present = chance.random() < SHARE
        self._version = chance.choice((0, 2))
        self._gap = chance.choice((1, 3))
        self.account = TxnAccount()
        self.producers: list[SimTxnProducer] = []
        self.readers: list[SimTxnReader] = []
        self.read_all = True
        """Whether readers came to the end, so that what they saw is all there is to see."""

    def settings(self) -> dict[str, str]:
        """What brokers are told, so that transactions live as fast as the rest."""
        return {
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        }

    def begin(self, common: tuple[Any, ...], nodes: list[int], keys: list[Key]) -> None:
        account = self.account
        for number in range(2):
            self.producers.append(
                SimTxnProducer(
                    *common,
                    160 + number,
                    nodes,
                    account=account,
                    keys=keys,
                    version=self._version,
                    gap=self._gap,
                )
            )
        for number, key in enumerate(keys):
            self.readers.append(SimTxnReader(*common, 170 + number, nodes, account=account, key=key))

    @property
    def clients(self) -> list[SimClient]:
        return [*self.producers, *self.readers]

    def kill_one(self) -> None:
        """A producer dies, in the middle of a transaction perhaps, and comes back."""
        chance = self.producers[0].random
        chance.choice(self.producers).begin()

    def heal(self) -> None:
        for producer in self.producers:
            producer.stopping = True

    def unwell(self, ends: Mapping[Key, int], readable: bool) -> str:
        """Why not everything is ended and, if it can be, read, given where the partitions end."""
        for producer in self.producers:
            if not producer.idle:
                return f"transactional producer {producer.id} is not done"
        late = [reader for reader in self.readers if reader.position < ends[reader.key]]
        self.read_all = not late
        for reader in late:
            if readable:
                return f"reader {reader.id} is held back at {reader.position} of {reader.key}, {ends[reader.key]}"
        return ""


def _added_error(reply: Any) -> int:
    errors = [
        partition.partition_error_code
        for topic in reply.results_by_topic_v3_and_below
        for partition in topic.results_by_partition
    ]
    return next((error for error in errors if error), ErrorCode.NONE)
