"""Random members of both protocols in one group, with delays, losses and coordinator restarts: what must hold always.

Members behave as clients do. One of the consumer protocol heartbeats, gives up what it is told to before it says so,
and starts over when it is fenced; one of the classic protocol joins, syncs, heartbeats, gives up everything before it
joins again, and assigns when it leads. Requests and replies get lost or come late, members stall, crash, leave and come
back, with the other protocol if the history is one of change; topics grow; the coordinator restarts from its records
while writes are held back. After every step: no partition is owned by two members that the coordinator knows; what was
acknowledged as committed is never forgotten, and no commit of another epoch is taken. Once faults stop, everybody is at
rest and every partition is owned.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.coordinators.classic_group import ClassicGroup
from headrace.coordinators.consumer_records import decode_assignment, encode_assignment
from headrace.coordinators.consumer_state import GroupState
from headrace.coordinators.effects import Body
from headrace.coordinators.group_states import STABLE
from headrace.coordinators.mixed_group import MixedGroup
from tests.coordinators.stage import Stage, subscription, topic_id

PARTITIONS = 6
MEMBERS = 4
STEPS = 200
SESSION_MS, REBALANCE_MS, TURN_MS = 10_000, 15_000, 500
PATIENCE_MS = REBALANCE_MS + SESSION_MS


class Actor:
    """One client process. `owned` is what it believes to own, in `epoch`."""

    def __init__(self, name: str, play: "Play", instance: str | None) -> None:
        self.name, self.play, self.instance = name, play, instance
        self.member_id, self.epoch, self.state = "", -1, "out"
        self.owned: set[int] = set()
        self.call = 0
        self.asked_ms = 0

    def ask(self, send: Callable[[str], None], then: Callable[[Body], None]) -> None:
        """A request whose reply counts only as long as nothing newer was asked."""
        self.call += 1
        ticket = f"{self.name}/{self.call}"
        self.play.expected[ticket] = (self, self.call, then)
        self.asked_ms = self.play.stage.now_ms
        if not self.play.loses():
            send(ticket)

    def turn(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        raise NotImplementedError

    def stop_waiting(self) -> None:
        """Any other request ends the wait for news."""

    @property
    def at_rest(self) -> bool:
        return self.state == "stable"

    def commit(self) -> None:
        play = self.play
        self.stop_waiting()
        if self.state != "stable" or not self.owned:
            return
        partition = play.random.choice(sorted(self.owned))
        play.number += 1
        turns = play.random.choice([0, 0, 0, 1, 4, 40]) if play.faulty else 0
        version = 9 if isinstance(self, Consumer) else 8
        play.commits.append((turns, self, self.member_id, self.epoch, partition, play.number, version))

    def send_commit(self, member_id: str, epoch: int, partition: int, number: int, version: int) -> None:
        """A commit arrives, perhaps long after it was sent."""
        play = self.play
        current = play.epoch_of(member_id) == epoch
        told = play.stage.commit(
            number,
            partition=partition,
            member=member_id,
            generation=epoch,
            instance=self.instance if version == 8 else None,
            version=version,
        )
        play.sent.append((partition, number, current, told))


class Consumer(Actor):
    """Speaks the consumer protocol."""

    def __init__(self, name: str, play: "Play", instance: str | None) -> None:
        super().__init__(name, play, instance)
        self.member_id = f"{name}-{play.next_id()}"
        self.says_all = True
        self.waits_until_ms = 0

    def turn(self) -> None:
        now_ms = self.play.stage.now_ms
        if self.state == "waiting" and now_ms >= self.waits_until_ms:
            self.stop_waiting()
        if self.state == "waiting":
            return
        if self.state == "asking" and now_ms - self.asked_ms < 4 * TURN_MS:
            return
        given: dict[str, Any] = {"instance": self.instance}
        if self.state == "asking":
            self.says_all = True  # no reply: it is not known what the coordinator heard
        if self.epoch <= 0:
            self.epoch, self.owned = 0, set()
        if self.says_all:
            given |= {"topics": ("t",), "rebalance": REBALANCE_MS, "owns": {"t": self.owned}}
        self.state = "asking"
        self.ask(
            lambda ticket: self.play.stage.beat(ticket, self.member_id, self.epoch, **given), self.answered
        )

    def answered(self, body: Body) -> None:
        error = ErrorCode(body["error_code"])
        self.state = "stable"
        if error in (
            ErrorCode.FENCED_MEMBER_EPOCH,
            ErrorCode.UNKNOWN_MEMBER_ID,
            ErrorCode.GROUP_ID_NOT_FOUND,
        ):
            self.epoch, self.owned, self.says_all, self.state = 0, set(), True, "out"
        elif error is ErrorCode.FENCED_INSTANCE_ID:
            self.play.replace(self)
        elif error is not ErrorCode.NONE:
            self.says_all, self.state = True, "out"
        else:
            before, self.epoch, self.says_all = self.epoch, body["member_epoch"], False
            if body.get("assignment") is None and self.epoch == before and self.play.random.random() < 0.7:
                self.wait()
            if body.get("assignment") is not None:
                topics = body["assignment"]["topic_partitions"]
                now = {index for topic in topics for index in topic["partitions"]}
                self.says_all = now != self.owned
                self.owned = now

    def wait(self) -> None:
        """Leave the heartbeat that brought nothing unanswered, as the broker does for clients that bear it."""
        shard = self.play.stage.shard

        def watch(ticket: str) -> None:
            waits_ms = shard.watch_consumer("g", self.member_id, self.play.stage.ticket(ticket))
            if waits_ms:
                self.state, self.waits_until_ms = "waiting", self.play.stage.now_ms + waits_ms

        self.ask(watch, self.answered)

    def stop_waiting(self) -> None:
        if self.state != "waiting":
            return
        group = self.play.stage.shard.groups.get("g")
        if isinstance(group, MixedGroup) and self.member_id in group._watchers:
            group.unwatch(self.member_id)
            self.call += 1
            self.state = "stable"
        else:
            self.state = "asking"  # there was news, and it is on its way or lost

    def leave(self) -> None:
        self.stop_waiting()
        self.call += 1
        epoch = -1 if self.instance is None else self.play.random.choice([-1, -2])
        self.play.stage.beat("gone", self.member_id, epoch, instance=self.instance)

    @property
    def at_rest(self) -> bool:
        return self.state in ("stable", "waiting") and not self.says_all


class Classic(Actor):
    """Speaks the classic protocol, and gives up everything before it joins again."""

    def turn(self) -> None:
        stage = self.play.stage
        if self.state == "out":
            self.join()
        elif self.state in ("joining", "syncing"):
            if stage.now_ms - self.asked_ms > PATIENCE_MS:
                self.state = "out"  # a client gives up on a silent broker, and starts over
        elif not self.play.loses():
            self.heard(stage.heartbeat(self.member_id, self.epoch, instance=self.instance))

    def join(self) -> None:
        self.state, self.owned = "joining", set()
        self.ask(
            lambda ticket: self.play.stage.join(
                ticket,
                member=self.member_id,
                instance=self.instance,
                client=self.name,
                session=SESSION_MS,
                rebalance=REBALANCE_MS,
                metadata=subscription("t"),
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
            self.member_id, self.epoch, self.state = body["member_id"], body["generation_id"], "syncing"
            given: dict[str, bytes] = {}
            members = sorted(each["member_id"] for each in body["members"])
            if body["leader"] == self.member_id:
                shares = {m: range(i, self.play.partitions, len(members)) for i, m in enumerate(members)}
                given = {m: encode_assignment(0, {"t": frozenset(share)}) for m, share in shares.items()}
            self.ask(
                lambda ticket: self.play.stage.sync(
                    ticket, self.member_id, self.epoch, given, instance=self.instance
                ),
                self.synced,
            )

    def synced(self, body: Body) -> None:
        error = ErrorCode(body["error_code"])
        if error is not ErrorCode.NONE:
            self.heard(error)
            return
        topics = decode_assignment(body["assignment"])
        assert topics is not None
        self.owned, self.state = set(topics.get("t", ())), "stable"

    def heard(self, error: ErrorCode) -> None:
        if error is ErrorCode.NONE:
            return
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self.member_id, self.epoch = "", -1
        self.owned, self.state = set(), "out"

    def leave(self) -> None:
        if self.state == "stable":
            self.play.stage.leave((self.member_id, self.instance))


class Play:
    """One history."""

    def __init__(self, seed: int, kinds: tuple[type[Actor], ...]) -> None:
        self.random = random.Random(seed)
        self.stage = Stage(
            **{
                "group.consumer.session.timeout.ms": SESSION_MS,
                "group.consumer.min.session.timeout.ms": SESSION_MS,
                "group.initial.rebalance.delay.ms": self.random.choice([0, 3000]),
                "group.consumer.assignors": self.random.choice(["uniform", "range"]),
            }
        )
        self.kinds = kinds
        self.partitions = PARTITIONS - 2
        self.stage.topic("t", self.partitions)
        self.faulty = True
        self.number = self.ids = 0
        self.expected: dict[str, tuple[Actor, int, Callable[[Body], None]]] = {}
        self.late: list[tuple[int, str, Body]] = []
        self.commits: list[tuple[int, Actor, str, int, int, int, int]] = []
        self.sent: list[tuple[int, int, bool, list[Any]]] = []
        self.acknowledged: dict[int, int] = {}
        self.actors = [
            self.random.choice(kinds)(f"m{n}", self, f"i{n}" if self.random.random() < 0.3 else None)
            for n in range(MEMBERS)
        ]

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def loses(self) -> bool:
        return self.faulty and self.random.random() < 0.05

    def replace(self, actor: Actor) -> None:
        """Its process is gone, and another one comes in its place."""
        actor.call += 1
        at = self.actors.index(actor)
        self.actors[at] = self.random.choice(self.kinds)(actor.name, self, actor.instance)
        self.actors[at].call = actor.call

    def epoch_of(self, member_id: str) -> int | None:
        """The epoch in which the coordinator takes commits of a member; None when it does not know it."""
        group = self.stage.shard.groups.get("g")
        if group is None or member_id not in group.members:
            return None
        return group.generation if isinstance(group, ClassicGroup) else group.members[member_id].epoch

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
        if chance < (0.08 if stage.holds_back else 0.01):
            stage.restart()
        elif chance < 0.10:
            self.replace(actor)
        elif chance < 0.12:
            actor.leave()
            self.replace(actor)
        elif chance < 0.18:
            stage.holds_back = True
        elif chance < 0.23 and stage.holds_back:
            stage.release()
        elif chance < 0.25 and self.partitions < PARTITIONS:
            self.partitions += 1
            stage.topic("t", self.partitions)

    def step(self) -> None:
        for actor in self.random.sample(self.actors, MEMBERS):
            if not self.faulty or self.random.random() < 0.8:
                actor.turn()
                self.deliver()
                actor.commit()
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
        for partition, number, current, told in list(self.sent):
            if told:
                self.sent.remove((partition, number, current, told))
                if told[0][0][2] is ErrorCode.NONE:
                    assert current, "a commit of a zombie was taken"
                    self.acknowledged[partition] = number
        if not self.stage.waiting:
            for partition, number in self.acknowledged.items():
                assert self.stage.committed(partition=partition) == number, "an acknowledged commit is lost"
        self.check_owners()

    def check_owners(self) -> None:
        group = self.stage.shard.groups.get("g")
        if group is None:
            return
        owners: dict[int, str] = {}
        for actor in self.actors:
            if self.epoch_of(actor.member_id) is None:
                continue
            if isinstance(group, ClassicGroup) and actor.epoch != group.generation:
                continue  # it has not heard of the new generation yet, and can commit nothing
            for partition in actor.owned:
                assert partition not in owners, f"{actor.name} and {owners[partition]} own {partition}"
                owners[partition] = actor.name

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.faulty = False
        self.stage.release()
        for _ in range(4 * PATIENCE_MS // TURN_MS):
            self.step()
        self.check_rest()
        self.stage.restart()
        self.check_rest()
        for actor in self.actors:
            actor.turn()
            self.deliver()
        self.check_rest()

    def check_rest(self) -> None:
        group = self.stage.shard.groups["g"]
        assert group.state in (STABLE, GroupState.STABLE), f"no peace once faults stop: {group.state}"
        assert all(actor.at_rest for actor in self.actors), [actor.state for actor in self.actors]
        assert sorted(p for actor in self.actors for p in actor.owned) == list(range(self.partitions))
        classic = all(isinstance(actor, Classic) for actor in self.actors)
        assert isinstance(group, ClassicGroup) == classic, "the group speaks what its members need"
        for actor in self.actors:
            assert self.epoch_of(actor.member_id) == actor.epoch
            if not isinstance(group, ClassicGroup):
                has = group.members[actor.member_id].current.assigned
                assert actor.owned == has.get(topic_id("t"), set())


@pytest.mark.parametrize("seed", range(25))
def test_members_of_the_consumer_protocol_keep_their_promises(seed: int) -> None:
    Play(seed, (Consumer,)).run()


@pytest.mark.parametrize("seed", range(25))
def test_a_group_keeps_its_promises_while_it_changes_its_protocol(seed: int) -> None:
    Play(seed, (Consumer, Classic)).run()
