"""Plain-text scenarios of transactions, step by step: what is asked, what is told, which markers go out.

A script in `txn_scripts/` is a list of steps. A step is a line of words: a verb and key=value pairs; what it brings
about is written under it, indented by two: replies, markers sent, then the state if it changed. `hold` keeps records
from being committed until `release`, `fail` lets them fail. Run with HEADRACE_REWRITE_SCRIPTS=1 to write down what
happens now; read the difference before it is committed.
"""

import os
from pathlib import Path

import pytest

from headrace.base.errors import ErrorCode
from headrace.base.settings import broker_config
from headrace.coordinators.effects import Effects, Record, TimerKey, Write
from headrace.coordinators.txn_records import NO_PRODUCER_ID
from headrace.coordinators.txn_shard import Ended, Markers, TransactionShard
from headrace.coordinators.txn_states import NAMES

SCRIPTS = sorted((Path(__file__).parent / "txn_scripts").glob("*.txt"))
START_MS = 1_700_000_000_000
ID = "id"


class Script:
    """One script being played, against one transactional id."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.log: list[Record] = []
        self.held: list[Write] | None = None
        self.error = ErrorCode.NONE
        self.timers: dict[TimerKey, int] = {}
        self.lines: list[str] = []
        self.sent: list[Markers] = []
        self.next_producer_id = 0
        self.state = "-"
        self.config = broker_config({"transactional.id.expiration.ms": "1000000"})
        self._new_shard()

    def _new_shard(self) -> None:
        self.shard = TransactionShard(lambda: self.config, self._send)
        for record in self.log:
            self.shard.replay(*record)
        self.run(self.shard.loaded)

    def _send(self, markers: Markers) -> None:
        self.sent.append(markers)
        where = ",".join(f"{topic}-{index}" for topic, index in markers.partitions)
        verdict = "commit" if markers.committed else "abort"
        self.lines.append(f"markers: {verdict} producer={markers.producer_id}:{markers.epoch} to {where}")

    def run(self, step) -> None:  # type: ignore[no-untyped-def]
        out = Effects()
        step(self.now_ms, out)
        for key, delay_ms in out.timers.items():
            self.timers.pop(key, None)
            if delay_ms is not None:
                self.timers[key] = self.now_ms + delay_ms
        for ticket, body in out.replies:
            ticket(body)
        for write in out.writes:
            if self.held is not None:
                self.held.append(write)
            else:
                self._store(write)

    def _store(self, write: Write) -> None:
        error = self.error
        if error is ErrorCode.NONE:
            self.log += write.records
        if write.then is not None:
            then = write.then
            self.run(lambda now_ms, out: then(error, now_ms, out))

    def play(self, line: str) -> list[str]:
        verb, *words = line.split()
        self.lines = []
        getattr(self, f"do_{verb}")(**dict(word.split("=", 1) for word in words))
        metadata = self.shard.transactions.get(ID)
        value = metadata.value if metadata is not None else None
        state = (
            "gone"
            if value is None
            else f"{NAMES[value.state]} producer={value.producer_id}:{value.producer_epoch}"
        )
        if state != self.state:
            self.state = state
            self.lines.append(f"state: {state}")
        return self.lines

    def _ended(self, ended: Ended) -> None:
        ok = ended.error is ErrorCode.NONE
        self.lines.append(f"told {ended.producer_id}:{ended.epoch}" if ok else f"told {ended.error.name}")

    def _told(self, error: ErrorCode) -> None:
        self.lines.append(f"told {error.name}")

    def _fresh(self) -> int:
        self.next_producer_id += 1
        return self.next_producer_id

    # -- steps ---------------------------------------------------------------------------------------------------------

    def do_init(self, timeout: str = "60000", expects: str = "") -> None:
        expected = tuple(map(int, expects.split(":"))) if expects else None
        needed = self.shard.needs_producer_id(ID, may_be_new=True)
        new_id = self._fresh() if needed else NO_PRODUCER_ID
        self.run(
            lambda now_ms, out: self.shard.initialize(
                ID,
                int(timeout),
                expected,
                new_id,
                self._ended,
                now_ms,
                out,  # type: ignore[arg-type]
            )
        )

    def do_add(self, producer: str, to: str, version: str = "0", waits: str = "no") -> None:
        partitions = [("t", int(index)) for index in to.split(",")]
        who = tuple(map(int, producer.split(":")))
        self.run(
            lambda now_ms, out: self.shard.add_partitions(
                ID, *who, partitions, int(version), self._told, now_ms, out, waits=waits == "yes"
            )
        )

    def do_verify(self, producer: str, to: str) -> None:
        partitions = [("t", int(index)) for index in to.split(",")]
        who = tuple(map(int, producer.split(":")))

        def verified(found: dict[tuple[str, int], ErrorCode]) -> None:
            self.lines.append(
                "told " + " ".join(f"{index}={error.name}" for (_, index), error in found.items())
            )

        self.run(lambda now_ms, out: self.shard.verify_partitions(ID, *who, partitions, verified, out))

    def do_commit(self, producer: str, version: str = "0") -> None:
        self._end(producer, True, int(version))

    def do_abort(self, producer: str, version: str = "0") -> None:
        self._end(producer, False, int(version))

    def _end(self, producer: str, committed: bool, version: int) -> None:
        who = tuple(map(int, producer.split(":")))
        needed = version >= 2 and self.shard.needs_producer_id(ID, may_be_new=False)
        new_id = self._fresh() if needed else NO_PRODUCER_ID
        self.run(
            lambda now_ms, out: self.shard.end(ID, *who, committed, version, new_id, self._ended, now_ms, out)
        )

    def do_marked(self, at: str, error: str = "NONE") -> None:
        results = [(("t", int(index)), ErrorCode[error]) for index in at.split(",")]
        self.run(lambda now_ms, out: self.shard.marked(ID, self.sent[-1].marking, results, now_ms, out))

    def do_wait(self, ms: str) -> None:
        end_ms = self.now_ms + int(ms)
        while due := [(at, key) for key, at in self.timers.items() if at <= end_ms]:
            at, key = min(due)
            self.now_ms = max(at, self.now_ms)
            del self.timers[key]
            self.run(lambda now_ms, out, key=key: self.shard.on_timer(key, now_ms, out))
        self.now_ms = end_ms

    def do_restart(self) -> None:
        self.timers.clear()
        self.held = None
        self._new_shard()

    def do_resign(self) -> None:
        self.run(lambda now_ms, out: self.shard.unload(ErrorCode.NOT_COORDINATOR, now_ms, out))

    def do_hold(self) -> None:
        self.held = []

    def do_release(self) -> None:
        held, self.held = self.held or [], None
        for write in held:
            self._store(write)

    def do_fail(self, error: str) -> None:
        self.error = ErrorCode[error]

    def do_epoch(self, is_: str) -> None:
        """As if the id had been used very often."""
        metadata = self.shard.transactions[ID]
        metadata.value = metadata.value._replace(producer_epoch=int(is_))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_happens_as_it_is_written(path: Path) -> None:
    script = Script()
    written = path.read_text()
    happened: list[str] = []
    for line in written.splitlines():
        if line.startswith("#") or not line.strip():
            happened.append(line)
        elif not line.startswith("  "):
            happened.append(line)
            happened += [f"  {each}" for each in script.play(line)]
    text = "\n".join(happened) + "\n"
    if os.environ.get("HEADRACE_REWRITE_SCRIPTS"):
        path.write_text(text)
    assert text == written
