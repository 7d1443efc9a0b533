"""Random members, delays, losses and coordinator restarts on a simulated clock: what must hold in every history.

Members behave as clients do: join, come again with the id they are given, sync (the leader assigns every partition
to one member), heartbeat, commit, and start over when they are told to. Requests and replies get lost or come late,
members stall, crash and leave, the coordinator restarts from its records, writes are held back. After every step: a
partition has at most one owner among those who believe in the newest generation; a stable group's partitions are
all owned; what was acknowledged as committed is never forgotten, and no commit of an older generation is taken.
Once faults stop, all converge to one stable generation.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.coordinators.effects import Body
from headrace.coordinators.group_states import STABLE
from tests.coordinators.stage import Stage

PARTITIONS = 6
MEMBERS = 4
STEPS = 250
SEEDS = range(60)
SESSION_MS, REBALANCE_MS, TURN_MS = 10_000, 15_000, 500
RESETS = {ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID}


class Actor:
    """One client process. `owned` is what it believes to own, in `generation`."""

    def __init__(self, name: str, play: "Play", instance: str | None) -> None:
        self.name, self.play, self.instance = name, play, instance
        self.call = 0
        self.forget()

    def forget(self) -> None:
        self.member_id, self.generation, self.state = "", -1, "out"
        self.owned: set[int] = set()
        self.call += 1

    def ask(self, send: Callable[[str], None], then: Callable[[Body], None]) -> None:
        """A request whose reply counts only as long as nothing newer was asked; lost ones are asked again later."""
        self.call += 1
        ticket = f"{self.name}/{self.call}"
        self.play.expected[ticket] = (self, self.call, then)
        self.asked_ms = self.play.stage.now_ms
        if not self.play.loses():
            send(ticket)

    def turn(self) -> None:
        stage = self.play.stage
        if self.state == "out":
            self.join()
        elif self.state in ("joining", "syncing"):
            if stage.now_ms - self.asked_ms > REBALANCE_MS + SESSION_MS:
                self.state = "out"  # a client gives up on a silent broker, and starts over
        elif not self.play.loses():
            self.heard(stage.heartbeat(self.member_id, self.generation, instance=self.instance))

    def join(self) -> None:
        self.state = "joining"
        self.ask(
            lambda ticket: self.play.stage.join(
                ticket,
                member=self.member_id,
                instance=self.instance,
                client=self.name,
                session=SESSION_MS,
                rebalance=REBALANCE_MS,
            ),
            self.joined,
        )

    def joined(self, body: Body) -> None:
        error = ErrorCode(body["error_code"])
        if error is ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = body["member_id"]
            self.join()
        elif error is not ErrorCode.NONE:
            self.heard(error)
        else:
            self.member_id, self.generation = body["member_id"], body["generation_id"]
            self.owned = set()
            self.state = "syncing"
            given: dict[str, bytes] = {}
            members = sorted(each["member_id"] for each in body["members"])
            if body["leader"] == self.member_id:
                given = {m: bytes(range(i, PARTITIONS, len(members))) for i, m in enumerate(members)}
            self.ask(
                lambda ticket: self.play.stage.sync(
                    ticket, self.member_id, self.generation, given, instance=self.instance
                ),
                self.synced,
            )

    def synced(self, body: Body) -> None:
        error = ErrorCode(body["error_code"])
        if error is not ErrorCode.NONE:
            self.heard(error)
            return
        self.owned = set(body["assignment"])
        self.state = "stable"

    def heard(self, error: ErrorCode) -> None:
        if error is ErrorCode.NONE:
            return
        if error in RESETS:
            self.member_id, self.generation = "", -1
        self.owned = set()
        self.state = "out"

    def commit(self) -> None:
        play, partition = self.play, self.play.random.randrange(PARTITIONS)
        if self.state != "stable" or partition not in self.owned:
            return
        play.number += 1
        turns = play.random.choice([0, 0, 0, 1, 4, 40]) if play.faulty else 0
        play.commits.append((turns, self, self.member_id, self.generation, partition, play.number))

    def send_commit(self, member_id: str, generation: int, partition: int, number: int) -> None:
        """A commit arrives, perhaps long after it was sent."""
        play = self.play
        group = play.stage.shard.groups.get("g")
        current = group is not None and group.generation == generation and member_id in group.members
        told = play.stage.commit(
            number,
            partition=partition,
            member=member_id,
            generation=generation,
            instance=self.instance,
        )
        play.sent.append((partition, number, current, told))


class Play:
    """One history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stage = Stage(**{"group.initial.rebalance.delay.ms": self.random.choice([0, 3000])})
        self.faulty = True
        self.number = 0
        self.expected: dict[str, tuple[Actor, int, Callable[[Body], None]]] = {}
        self.late: list[tuple[int, str, Body]] = []
        self.commits: list[tuple[int, Actor, str, int, int, int]] = []
        self.sent: list[tuple[int, int, bool, list[Any]]] = []
        self.acknowledged: dict[int, int] = {}
        self.actors = [
            Actor(f"m{n}", self, f"i{n}" if self.random.random() < 0.3 else None) for n in range(MEMBERS)
        ]

    def loses(self) -> bool:
        return self.faulty and self.random.random() < 0.05

    def deliver(self) -> None:
        """Replies reach their clients: some late, some never."""
        while self.stage.replies or any(at <= self.stage.now_ms for at, _, _ in self.late):
            for ticket, body in self.stage.replies:
                if not self.loses():
                    delay_ms = self.random.choice([0, 0, 0, 700, 6000]) if self.faulty else 0
                    self.late.append((self.stage.now_ms + delay_ms, ticket, body))
            self.stage.replies.clear()
            due = [each for each in self.late if each[0] <= self.stage.now_ms]
            self.late = [each for each in self.late if each[0] > self.stage.now_ms]
            for _, ticket, body in due:
                actor, call, then = self.expected.pop(ticket, (None, 0, None))
                if actor is not None and then is not None and actor.call == call:
                    then(body)

    def fault(self) -> None:
        stage, chance = self.stage, self.random.random()
        actor = self.random.choice(self.actors)
        if chance < 0.02:
            stage.restart()
        elif chance < 0.04:
            actor.forget()  # it crashed: a new process comes in its place
        elif chance < 0.06 and actor.state == "stable":
            stage.leave((actor.member_id, actor.instance))
            actor.forget()
        elif chance < 0.09:
            stage.holds_back = True
        elif chance < 0.15 and stage.holds_back:
            stage.release()

    def step(self) -> None:
        for actor in self.random.sample(self.actors, MEMBERS):
            if not self.faulty or self.random.random() < 0.8:
                actor.turn()
                actor.commit()
                self.deliver()
                self.check()
        commits, self.commits = self.commits, []
        for turns, actor, *commit in commits:
            if turns:
                self.commits.append((turns - 1, actor, *commit))
            else:
                actor.send_commit(*commit)
        if self.faulty:
            self.fault()
        self.stage.advance(TURN_MS)
        self.deliver()
        self.check()

    def check(self) -> None:
        group = self.stage.shard.groups.get("g")
        for partition, number, current, told in list(self.sent):
            if not told:
                continue
            self.sent.remove((partition, number, current, told))
            if told[0][0][2] is ErrorCode.NONE:
                assert current, "a commit of a zombie was taken"
                self.acknowledged[partition] = number
        if self.stage.waiting:
            return  # what is on its way into the log may show itself at any time
        for partition, number in self.acknowledged.items():
            assert self.stage.committed(partition=partition) == number, "an acknowledged commit is lost"
        if group is None or group.state is not STABLE:
            return
        given = [partition for member in group.members for partition in member.assignment]
        assert sorted(given) == list(range(PARTITIONS)), "every partition has one owner in a stable group"
        owners = [
            partition
            for actor in self.actors
            if actor.generation == group.generation and actor.member_id in group.members
            for partition in actor.owned
        ]
        assert len(owners) == len(set(owners)), "two members of a generation own one partition"

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.faulty = False
        self.stage.release()
        for _ in range(4 * (REBALANCE_MS + SESSION_MS) // TURN_MS):
            self.step()
        group = self.stage.shard.groups["g"]
        assert group.state is STABLE, f"no peace once faults stop: {group.state}"
        assert {actor.state for actor in self.actors} == {"stable"}
        assert {actor.generation for actor in self.actors} == {group.generation}
        assert sorted(p for actor in self.actors for p in actor.owned) == list(range(PARTITIONS))
        self.stage.restart()
        self.check()
        for actor in self.actors:  # what is stable is stored: a coordinator that comes back knows it all
            alive = self.stage.heartbeat(actor.member_id, actor.generation, instance=actor.instance)
            assert alive is ErrorCode.NONE


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_history_keeps_its_promises(seed: int) -> None:
    Play(seed).run()
