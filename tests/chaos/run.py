"""One run of chaos: clients that write and read, faults by a schedule, then peace, and the account.

Called by `python -m tests.chaos` and by the short run of the test suite.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka.admin import AdminClient, NewTopic

from tests.chaos.checker import Account, History, check
from tests.chaos.clients import COMMON, Asker, Notes, Reader, Writer, read_everything
from tests.chaos.nemesis import Nemesis
from tests.chaos.schedule import Step
from tests.chaos.systems import System

TOPIC = "chaos"
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

    def create(self) -> None:
        topic = NewTopic(TOPIC, self._partitions, REPLICAS, config={"min.insync.replicas": "2"})
        self._admin.create_topics([topic])[TOPIC].result(60)

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


def run(
    system: System,
    steps: list[Step],
    say: Callable[[str], None],
    *,
    partitions: int = 4,
    writers: int = 3,
    rate: float = 200.0,
) -> Outcome:
    """Run a schedule to its end on a system that is not started yet."""
    history, notes, problems = History(), Notes(), []
    system.start_all()
    eyes = Eyes(system.bootstrap, partitions)
    eyes.create()
    bootstrap = system.bootstrap
    writing = [Writer(f"w{n}", bootstrap, TOPIC, partitions, rate, history, notes) for n in range(writers)]
    others: list[Reader | Asker] = [
        *(Reader(f"reader{n}", bootstrap, TOPIC, partitions, history, notes) for n in range(2)),
        Asker("asker", bootstrap, TOPIC, partitions, history),
    ]
    for client in [*writing, *others]:
        client.thread.start()
    nemesis = Nemesis(system, eyes.whois, say)
    nemesis.run(steps)
    say("peace: everything is mended and started")
    nemesis.make_whole()
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
    read_everything(bootstrap, TOPIC, partitions, history)
    gaps = {w.name: round(max(w.gap_s.values(), default=0.0), 2) for w in writing}
    return Outcome(check(history), dict(notes.counts), gaps, problems)
