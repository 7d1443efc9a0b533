"""Five brokers, real clients, Spark, what dies in the middle, and an account of every record.

Run by `make demo`, in two acts; the second, a pipeline on Spark, is in `demo_pipeline`. The first: confluent-kafka
writes numbered records with acks=all to a topic of three replicas while kafka-python reads them; halfway the broker
that leads a partition is killed with SIGKILL. Another takes over, the stream goes on, and the killed broker is started
again and catches up. Then the same the other way round, without a kill. At the end the topics are read from the
beginning and held against what was acknowledged: the exit status is 1 when anything acknowledged is missing, damaged,
doubled or out of order.
"""

import argparse
import sys
import threading
import time
from dataclasses import dataclass, field
from zlib import crc32

from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPythonPartition
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from examples.telling import DEADLINE_S, console, say, wait_for
from headrace.testing import Cluster

BROKERS = 5
REPLICAS = 3
PARTITIONS = 5
RATE_PER_S = 10_000  # slow enough that the kill falls into the middle of the stream on any machine
PACE_RECORDS = 100
DEAD_S = 2.0
BACK_RECORDS_DIVISOR = 10


def record(number: int) -> bytes:
    """A record that shows damage: its number, some bulk, and a checksum of both."""
    body = b"%012d " % number + b"~" * 80
    return body + b" %08x" % crc32(body)


def number_of(value: bytes) -> int | None:
    """The number in a record, or None when the record is damaged."""
    body, _, checksum = value.rpartition(b" ")
    return int(body[:12]) if checksum == b"%08x" % crc32(body) else None


@dataclass
class Stream:
    """What the writer was told, by partition, in the order of the acknowledgements."""

    total: int
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> (partition, offset)
    refused: list[str] = field(default_factory=list)
    last_ack_s: dict[int, float] = field(default_factory=dict)
    gaps_s: dict[int, float] = field(
        default_factory=dict
    )  # by partition, the longest wait for an acknowledgement
    seconds: float = 0.0

    def on_ack(self, number: int, partition: int, offset: int) -> None:
        now_s = time.monotonic()
        gap_s = now_s - self.last_ack_s.get(partition, now_s)
        self.gaps_s[partition] = max(gap_s, self.gaps_s.get(partition, 0.0))
        self.last_ack_s[partition] = now_s
        self.acked[number] = (partition, offset)

    @property
    def gap_s(self) -> float:
        return max(self.gaps_s.values(), default=0.0)


@dataclass
class Account:
    """What a reader found, held against what was acknowledged."""

    found: int = 0
    missing: int = 0
    damaged: int = 0
    duplicates: int = 0
    disordered: int = 0
    elsewhere: int = 0

    @property
    def clean(self) -> bool:
        return not (self.missing or self.damaged or self.duplicates or self.disordered or self.elsewhere)


def write_with_confluent(bootstrap: str, topic: str, stream: Stream) -> None:
    """Sends all records at a steady rate; a broker that goes away is waited for."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 2,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
    )
    begun_s = time.monotonic()

    def delivered(number: int):
        def report(error, message) -> None:
            if error:
                stream.refused.append(str(error))
            else:
                stream.on_ack(number, message.partition(), message.offset())

        return report

    for number in range(stream.total):
        while True:
            try:
                producer.produce(
                    topic, record(number), partition=number % PARTITIONS, on_delivery=delivered(number)
                )
                break
            except BufferError:
                producer.poll(0.05)
        if number % PACE_RECORDS == 0:
            producer.poll(max(0.0, begun_s + number / RATE_PER_S - time.monotonic()))
    producer.flush(DEADLINE_S)
    stream.seconds = time.monotonic() - begun_s


def read_live_with_kafka_python(bootstrap: str, topic: str, total: int, seen: set[int]) -> None:
    """Reads along while the stream is written, over the death of the broker, until every number was seen."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="earliest", reconnect_backoff_max_ms=200
    )
    consumer.assign([KafkaPythonPartition(topic, p) for p in range(PARTITIONS)])
    deadline_s = time.monotonic() + DEADLINE_S
    while len(seen) < total and time.monotonic() < deadline_s:
        for batch in consumer.poll(timeout_ms=200).values():
            seen.update(n for message in batch if (n := number_of(message.value)) is not None)
    consumer.close()


def write_with_kafka_python(bootstrap: str, topic: str, stream: Stream) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, linger_ms=2)
    begun_s = time.monotonic()
    sent = [producer.send(topic, record(n), partition=n % PARTITIONS) for n in range(stream.total)]
    producer.flush(timeout=DEADLINE_S)
    for number, future in enumerate(sent):
        try:
            metadata = future.get(timeout=1)
            stream.on_ack(number, metadata.partition, metadata.offset)
        except Exception as error:
            stream.refused.append(str(error))
    producer.close()
    stream.seconds = time.monotonic() - begun_s


def read_all_with_confluent(bootstrap: str, topic: str) -> list[tuple[int, int, bytes]]:
    """Every record from the first to the last: (partition, offset, value)."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "demo", "check.crcs": True})
    parts = [TopicPartition(topic, p) for p in range(PARTITIONS)]
    left = sum(consumer.get_watermark_offsets(part, timeout=10)[1] for part in parts)
    consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    found: list[tuple[int, int, bytes]] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < left and time.monotonic() < deadline_s:
        found += [
            (m.partition(), m.offset(), m.value()) for m in consumer.consume(10_000, 1.0) if not m.error()
        ]
    consumer.close()
    return found


def read_all_with_kafka_python(bootstrap: str, topic: str) -> list[tuple[int, int, bytes]]:
    """Every record from the first to the last: (partition, offset, value)."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="earliest", check_crcs=True
    )
    parts = [KafkaPythonPartition(topic, p) for p in range(PARTITIONS)]
    left = sum(consumer.end_offsets(parts).values())
    consumer.assign(parts)
    found: list[tuple[int, int, bytes]] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < left and time.monotonic() < deadline_s:
        for batch in consumer.poll(timeout_ms=1000).values():
            found += [(m.partition, m.offset, m.value) for m in batch]
    consumer.close()
    return found


def settle(stream: Stream, found: list[tuple[int, int, bytes]]) -> Account:
    """Holds what was found against what was acknowledged."""
    account = Account(found=len(found))
    where: dict[int, tuple[int, int]] = {}
    latest = [-1] * PARTITIONS
    for partition, offset, value in found:
        number = number_of(value)
        if number is None:
            account.damaged += 1
            continue
        account.duplicates += number in where
        account.disordered += number < latest[partition]
        latest[partition] = max(latest[partition], number)
        where.setdefault(number, (partition, offset))
    for number, place in stream.acked.items():
        account.missing += number not in where
        account.elsewhere += number in where and where[number] != place
    return account


@dataclass
class Crash:
    """What was seen of the death of a leader."""

    broker: int = 0
    partition: int = 0
    successor: int = 0
    in_sync_s: float = 0.0


def stream_over_a_crash(cluster: Cluster, topic: str, total: int) -> tuple[Stream, set[int], Crash]:
    """What was acknowledged, what the live reader saw, and what became of the leader."""
    stream, seen, crash = Stream(total), set[int](), Crash()
    writer = threading.Thread(
        target=write_with_confluent, args=(cluster.bootstrap, topic, stream), daemon=True
    )
    reader = threading.Thread(
        target=read_live_with_kafka_python, args=(cluster.bootstrap, topic, total, seen), daemon=True
    )
    columns = [TextColumn("           {task.description:<24}"), BarColumn(40), MofNCompleteColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        acked_bar = progress.add_task("acknowledged", total=total)
        seen_bar = progress.add_task("read along", total=total)

        def show() -> None:
            progress.update(acked_bar, completed=len(stream.acked))
            progress.update(seen_bar, completed=len(seen))

        def shown(condition):
            return lambda: show() or condition()

        say(f"confluent-kafka writes {total:,} records with acks=all, kafka-python reads along")
        reader.start()
        writer.start()
        wait_for(shown(lambda: len(stream.acked) >= total // 2), "half of the records")
        crash.broker = cluster.leader(topic, crash.partition)
        victim = cluster.broker(crash.broker)
        pid = victim.pid
        victim.kill()
        at_kill = len(stream.acked)
        if at_kill == total:
            sys.exit(
                "demo: everything was acknowledged before the kill, so it shows nothing; give more --records"
            )
        say(
            f"[bold red]kill -9 {pid}[/]  broker {crash.broker}, leader of partition {crash.partition}, "
            f"at {at_kill:,} acknowledged records"
        )
        time.sleep(DEAD_S)
        crash.successor = cluster.leader(topic, crash.partition)
        say(f"broker {crash.successor} leads partition {crash.partition} now")
        begun_s = time.monotonic()
        victim.start()
        say(f"[bold green]started broker {crash.broker} again[/]  pid {victim.pid}")
        cluster.await_in_sync(topic)
        crash.in_sync_s = time.monotonic() - begun_s
        say(f"all replicas are in sync again {crash.in_sync_s:.1f} s after its start")
        wait_for(shown(lambda: not writer.is_alive()), "the writer")
        wait_for(shown(lambda: not reader.is_alive()), "the reader")
        show()
    say(f"all sent: {len(stream.acked):,} acknowledged, longest wait in any partition {stream.gap_s:.2f} s")
    return stream, seen, crash


def print_account(rows: list[tuple[str, Stream, Account]], live: int, crash: Crash) -> bool:
    """The table, and whether everything is there."""
    table = Table(title="Account of every acknowledged record", title_style="bold", width=78)
    table.add_column("", no_wrap=True)
    for name, _, _ in rows:
        table.add_column(name, justify="right")

    def row(label: str, values: list[object], bad_if_any: bool = False) -> None:
        style = "bold red" if bad_if_any and any(values) else ""
        table.add_row(label, *(f"{v:,}" if isinstance(v, int) else str(v) for v in values), style=style)

    row("records sent", [s.total for _, s, _ in rows])
    row("acknowledged", [len(s.acked) for _, s, _ in rows])
    row("found from the beginning on", [a.found for _, _, a in rows])
    row("read live, over the crash", [live, "-"])
    row("time to write (s)", [f"{s.seconds:.2f}" for _, s, _ in rows])
    row("longest wait in a partition (s)", [f"{rows[0][1].gap_s:.2f}", "-"])
    table.add_section()
    row("acknowledged, missing", [a.missing for _, _, a in rows], True)
    row("duplicates", [a.duplicates for _, _, a in rows], True)
    row("out of order", [a.disordered for _, _, a in rows], True)
    row("damaged", [a.damaged for _, _, a in rows], True)
    row("at a wrong offset", [a.elsewhere for _, _, a in rows], True)
    row("refused", [len(s.refused) for _, s, _ in rows], True)
    console.print()
    console.print(table)
    complete = all(a.clean and not s.refused and len(s.acked) == s.total for _, s, a in rows)
    complete = complete and live == rows[0][1].total
    if complete:
        verdict = (
            "[bold green]Lost 0, doubled 0, reordered 0.[/] When the leader was killed, writes to its partitions "
            f"waited {rows[0][1].gap_s:.2f} s; it was back in sync {crash.in_sync_s:.1f} s after its start."
        )
    else:
        verdict = "[bold red]The account does not balance: see the table.[/]"
    note = (
        "With acks=all and min.insync.replicas=2 a record is acknowledged when at least two brokers have it. What must "
        "also survive a power cut of all of them is written with flush.messages=1 on its topic."
    )
    console.print(Panel(f"{verdict}\n[dim]{note}[/]", width=78, border_style="green" if complete else "red"))
    return complete


def clients_over_a_crash(cluster: Cluster, total: int) -> bool:
    """The first act: two clients, one stream each way; whether the account balances."""
    for topic in ("river", "back"):
        cluster.create_topic(topic, PARTITIONS, REPLICAS, {"min.insync.replicas": "2"})
    say(f"topics river and back, {PARTITIONS} partitions of {REPLICAS} replicas each")
    stream, seen, crash = stream_over_a_crash(cluster, "river", total)
    account = settle(stream, read_all_with_kafka_python(cluster.bootstrap, "river"))

    back = Stream(max(1, total // BACK_RECORDS_DIVISOR))
    say(f"the other way: kafka-python writes {back.total:,} records, confluent-kafka reads them")
    write_with_kafka_python(cluster.bootstrap, "back", back)
    back_account = settle(back, read_all_with_confluent(cluster.bootstrap, "back"))
    return print_account(
        [
            ("confluent-kafka →\nkafka-python", stream, account),
            ("kafka-python →\nconfluent-kafka", back, back_account),
        ],
        len(seen),
        crash,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--records", type=int, default=100_000, help="how many the first stream has (default: 100000)"
    )
    parser.add_argument(
        "--without-spark", action="store_true", help="only the first act: brokers and clients, no pipeline"
    )
    options = parser.parse_args()
    begun_s = time.monotonic()
    with Cluster(BROKERS) as cluster:
        say(
            f"[bold]headrace[/] brokers 1 to {BROKERS} on {cluster.bootstrap}, "
            f"ready in {(time.monotonic() - begun_s) * 1000:.0f} ms"
        )
        complete = clients_over_a_crash(cluster, options.records)
        if not options.without_spark:
            from examples.demo_pipeline import run_pipeline

            console.print()
            complete = run_pipeline(cluster) and complete
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
