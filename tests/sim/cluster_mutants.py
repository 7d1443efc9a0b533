"""Bugs planted in the cluster's code, one at a time, to see that the simulator finds them.

Each is a mistake that an implementation has made or could make in elections, in the ISR, in replication or in what is
acknowledged. `planted` puts it into the production code for as long as it lasts. A mutant that no seed catches says
that the simulator, not the code, is wrong. Used by `test_cluster.py` and `python -m tests.sim cluster --mutant NAME`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.base.errors import ErrorCode
from headrace.cluster import broker_control, elections, partition_control
from headrace.coordinators import consumer_group, reconciliation
from headrace.coordinators.group_shard import GroupShard
from headrace.coordinators.shard import Shard
from headrace.replication import partition
from headrace.replication.partition import Partition
from headrace.replication.replicas import Replicas
from headrace.storage import producers
from headrace.storage.producer_state import ProducerState
from tests.coordinators import txn_mutants

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register what replaces what."""
    MUTANTS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The production code with one bug in it."""
    patches = [
        (owner, attribute, value, owner.__dict__[attribute]) for owner, attribute, value in MUTANTS[name]()
    ]
    for owner, attribute, value, _ in patches:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, _, original in patches:
            setattr(owner, attribute, original)


# -- elections and the ISR, as the controller decides them ---------------------------------------------------------


@mutant
def elect_outside_the_isr() -> list[Patch]:
    original = elections.elected

    def elected(registration: Any, may_lead: Any, *, unclean: bool = False) -> Any:
        return original(registration, may_lead, unclean=True)

    return [(elections, "elected", elected), (partition_control, "elected", elected)]


@mutant
def unclean_restart_keeps_its_place_in_the_isr() -> list[Patch]:
    return [(broker_control, "begin_anew", lambda image, broker_id, unclean=None: [])]


@mutant
def fenced_leader_leads_on_with_the_epoch_it_had() -> list[Patch]:
    original = elections.changed_record

    def changed_record(topic: Any, index: int, wanted: Any, new_epoch: bool = False) -> Any:
        before = topic.partitions[index]
        made = original(topic, index, wanted, new_epoch)
        return type(made)(
            made.topic_id,
            made.index,
            *wanted._replace(leader_epoch=before.leader_epoch, partition_epoch=before.partition_epoch + 1),
        )

    return [
        (elections, "changed_record", changed_record),
        (partition_control, "changed_record", changed_record),
    ]


# -- the leader ----------------------------------------------------------------------------------------------------


@mutant
def high_watermark_from_all_followers_but_one() -> list[Patch]:
    original = Partition._count_needed

    def count_needed(self: Partition) -> None:
        original(self)
        self._needed = self._needed[:-1]

    return [(Partition, "_count_needed", count_needed)]


@mutant
def acknowledge_before_the_isr_has_it() -> list[Patch]:
    def is_safe(self: Partition, offset: int, flushed: bool, replicated: bool) -> bool:
        return not flushed or self.log.flushed_offset >= offset

    return [(Partition, "is_safe", is_safe)]


@mutant
def do_not_wait_for_replicas_that_were_proposed() -> list[Patch]:
    def count_needed(self: Partition) -> None:
        self._needed = tuple([f for f in self.followers.values() if f.node_id in self.isr])

    return [(Partition, "_count_needed", count_needed)]


@mutant
def take_the_isr_from_the_answer() -> list[Patch]:
    """A leader takes up a shrunken ISR when the controller has answered, or when it asked, not with the image."""
    original = Partition.propose

    def propose(self: Partition, *args: Any) -> Any:
        proposal = original(self, *args)
        if proposal is not None:
            self.isr = tuple([member for member, _ in proposal.isr])
            self._hoped = frozenset()
            self._count_needed()
            self.advance()
        return proposal

    return [(Partition, "propose", propose)]


@mutant
def count_what_is_not_flushed() -> list[Patch]:
    return [(partition, "FLUSH_EVERY_BATCH", 0)]


@mutant
def step_back_without_telling_producers() -> list[Patch]:
    """A deposed leader acknowledges what waits, as if it were safe."""
    original = Partition.fail_waiters

    def fail_waiters(self: Partition, error: ErrorCode) -> None:
        original(self, ErrorCode.NONE if error is ErrorCode.NOT_LEADER_OR_FOLLOWER else error)

    return [(Partition, "fail_waiters", fail_waiters)]


# -- the follower --------------------------------------------------------------------------------------------------


@mutant
def skip_truncation_on_divergence() -> list[Patch]:
    return [(Partition, "diverging", lambda self, offset, last_epoch: None)]


@mutant
def truncate_to_the_high_watermark() -> list[Patch]:
    """As followers did before they knew leader epochs: what is above it may be acknowledged all the same."""
    original = Partition._step_back

    def step_back(self: Partition) -> None:
        original(self)
        self.log.truncate_to(self.high_watermark)

    return [(Partition, "_step_back", step_back)]


@mutant
def forget_what_producers_sent() -> list[Patch]:
    return [(producers, "replay_headers", lambda *args: None), (ProducerState, "check", lambda *args: None)]


@mutant
def an_idle_follower_is_not_looked_at_again() -> list[Patch]:
    def check_isr(self: Replicas, now_ms: float) -> None:
        self._checked_ms = now_ms

    return [(Replicas, "_check_isr", check_isr)]


# -- groups --------------------------------------------------------------------------------------------------------


@mutant
def answer_a_coordinator_s_write_before_it_is_replicated() -> list[Patch]:
    def wait(self: Shard[Any], writes: Any, partition: Partition, end: int, flushed: bool) -> None:
        self._committed(writes, telling=True)

    return [(Shard, "_wait", wait)]


@mutant
def coordinate_before_the_log_is_loaded() -> list[Patch]:
    """A new leader counts what is below its high watermark, which lags behind what was committed."""
    original = Shard.load_some

    def load_some(self: Shard[Any]) -> bool:
        self._load_end = 0
        return original(self)

    return [(Shard, "load_some", load_some)]


@mutant
def take_commits_of_any_generation() -> list[Patch]:
    return [(GroupShard, "_check_committer", lambda self, who, group: ErrorCode.NONE)]


@mutant
def give_partitions_that_others_still_own() -> list[Patch]:
    original = reconciliation.next_step

    def next_step(current: Any, target_epoch: int, target: Any, owned: Any, has_owner: Any) -> Any:
        return original(current, target_epoch, target, owned, lambda topic_id, index: False)

    return [(consumer_group, "next_step", next_step)]


# -- transactions: mistakes that the simulation of their coordinator alone finds too -----------------------------------

MUTANTS |= {
    name: txn_mutants.MUTANTS[name]
    for name in (
        "begin-anew-without-ending-what-is-open",
        "leave-what-the-coordinator-before-had-decided",
        "let-readers-past-open-transactions",
        "look-for-aborted-transactions-in-one-segment-only",
    )
}
