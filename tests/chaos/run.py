"""One run of chaos: clients that write and read, faults by a schedule, then peace, and the account.

Called by `python -m tests.chaos` and by the short run of the test suite.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.checker import SHOWN_MAX, Account, History, check, check_copies
from tests.chaos.clients import COMMON, Asker, Notes, Reader, Writer, read_everything
from tests.chaos.copiers import Copier, lag
from tests.chaos.nemesis import Nemesis
from tests.chaos.own_clients import OwnReader, OwnWriter
from tests.chaos.schedule import Step
from tests.chaos.systems import System

TOPIC = "chaos"
COPIES = "copies"
COPIED_S = 180.0
REPLICAS = 3
IN_SYNC_S = 120.0
LOOK_EVERY_S = 0.25


@dataclass
class Outcome:
    """What a run came to."""

    account: Account
    notes: dict[str, int]
    gaps_s: dict[str, float]
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.account.violations and not self.problems and self.account.unanswered == 0


class Eyes:
    """What a client's metadata says of the cluster: who leads, who is the controller, who is in sync."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self._admin = AdminClient({**COMMON, "bootstrap.servers": bootstrap})
        self._partitions = partitions

    def create(self, name: str = TOPIC) -> None:
        topic = NewTopic(name, self._partitions, REPLICAS, config={"min.insync.replicas": "2"})
        self._admin.create_topics([topic])[name].result(60)

    def whois(self, role: str, pick: int) -> int | None:
        if role == "any":
            return None
        try:
            seen = self._admin.list_topics(TOPIC, timeout=2)
        except Exception:
            return None
        if role == "controller":
            return seen.controller_id if seen.controller_id > 0 else None
        found = seen.topics[TOPIC].partitions.get(pick % self._partitions)
        return found.leader if found is not None and found.leader > 0 else None

    def await_in_sync(self) -> str:
        """Nothing when every replica is in sync again, else what is still wrong when time is up."""
        deadline_s = time.monotonic() + IN_SYNC_S
        wrong = "no answer"
        while time.monotonic() < deadline_s:
            try:
                parts = self._admin.list_topics(TOPIC, timeout=5).topics[TOPIC].partitions
            except Exception as error:
                wrong = str(error)
                continue
            behind = {n: sorted(set(p.replicas) - set(p.isrs)) for n, p in parts.items()}
            behind = {n: missing for n, missing in behind.items() if missing or parts[n].leader < 0}
            if len(parts) == self._partitions and not behind:
                return ""
            wrong = f"not in sync, by partition: {behind}"
            time.sleep(LOOK_EVERY_S)
        return f"{wrong} after {IN_SYNC_S:.0f} s of peace"


def _copied(
    copying: list[Copier], bootstrap: str, partitions: int, history: History, say: Callable[[str], None]
) -> list[str]:
    """Wait until the copiers have copied everything, end them, and hold the copy against its source."""
    total = sum(map(len, history.final.values()))
    deadline_s = time.monotonic() + COPIED_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(KafkaException):
            if lag(bootstrap, TOPIC, partitions) == 0:
                break
        time.sleep(1.0)
    for copier in copying:
        copier.stop()
    copies = read_everything(bootstrap, COPIES, partitions)
    say(f"{sum(map(len, copies.values())):,} of {total:,} records are copied")
    return [f"{v.kind}: {v.text}" for v in check_copies(history.final, copies)][:SHOWN_MAX]


def run(
    system: System,
    steps: list[Step],
    say: Callable[[str], None],
    *,
    partitions: int = 4,
    writers: int = 3,
    rate: float = 200.0,
    copiers: int = 0,
) -> Outcome:
    """Run a schedule to its end on a system that is not started yet."""
    history, notes, problems = History(), Notes(), []
    system.start_all()
    eyes = Eyes(system.bootstrap, partitions)
    eyes.create()
    bootstrap = system.bootstrap
    # confluent-kafka and the project's own client in turn.
    writing = [
        (OwnWriter if n % 2 else Writer)(
            f"own{n}" if n % 2 else f"w{n}", bootstrap, TOPIC, partitions, rate, history, notes
        )
        for n in range(writers)
    ]
    others: list[Reader | OwnReader | Asker] = [
        Reader("reader", bootstrap, TOPIC, partitions, history, notes),
        OwnReader("own-reader", bootstrap, TOPIC, partitions, history, notes),
        Asker("asker", bootstrap, TOPIC, partitions, history),
    ]
    copying = [Copier(f"copier{n}", bootstrap, TOPIC, COPIES, notes) for n in range(copiers)]
    if copying:
        eyes.create(COPIES)
    for client in [*writing, *others, *copying]:
        client.thread.start()
    nemesis = Nemesis(system, eyes.whois, say)
    nemesis.run(steps)
    say("peace: everything is mended and started")
    nemesis.make_whole()
    for copier in copying:
        copier.spare()
    if wrong := eyes.await_in_sync():
        problems.append(wrong)
    say("all replicas are in sync" if not problems else problems[0])
    for writer in writing:
        writer.stop()
    say("the writers are done")
    for client in others:
        client.stop()
    if stuck := [client.thread.name for client in [*writing, *others] if client.thread.is_alive()]:
        problems.append(f"did not end: {', '.join(stuck)}")
    history.final = read_everything(bootstrap, TOPIC, partitions)
    account = check(history)
    # Told before the copies are waited for, which may take minutes on a busy machine.
    say(f"{len(account.violations)} violations, {account.unanswered} records without an answer")
    if copying:
        problems += _copied(copying, bootstrap, partitions, history, say)
    gaps = {w.name: round(max(w.gap_s.values(), default=0.0), 2) for w in writing}
    return Outcome(account, dict(notes.counts), gaps, problems)
