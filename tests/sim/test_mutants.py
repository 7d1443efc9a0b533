"""Bugs planted in Raft and in the cluster's code are found: each by a seed that found it before, or by another.

Any change of the code shifts what a seed brings about. So where the seed that is written down does not find the bug any
more, others are tried, of a bug in groups or transactions only those that have some; a bug that none of them finds says
that the simulator has become blind to it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice

import pytest

from tests.sim import cluster_mutants, cluster_scenario, mutants, raft_scenario
from tests.sim.cluster_groups import Groups
from tests.sim.cluster_loop import Crashed
from tests.sim.cluster_transactions import Transactions
from tests.sim.raft_oracle import Violation

OTHER_CLUSTER_SEEDS, OTHER_RAFT_SEEDS = 400, 600

FOUND_IN_CLUSTERS = {
    "acknowledge-before-the-isr-has-it": 1,
    "an-idle-follower-is-not-looked-at-again": 4,
    "answer-a-coordinator-s-write-before-it-is-replicated": 152,
    "begin-anew-without-ending-what-is-open": 35,
    "coordinate-before-the-log-is-loaded": 62,
    "count-what-is-not-flushed": 308,
    "do-not-wait-for-replicas-that-were-proposed": 95,
    "elect-outside-the-isr": 26,
    "fenced-leader-leads-on-with-the-epoch-it-had": 15,
    "forget-what-producers-sent": 1,
    "give-partitions-that-others-still-own": 41,
    "high-watermark-from-all-followers-but-one": 1,
    "leave-what-the-coordinator-before-had-decided": 26,
    "let-readers-past-open-transactions": 17,
    "look-for-aborted-transactions-in-one-segment-only": 17,
    "skip-truncation-on-divergence": 4,
    "step-back-without-telling-producers": 2,
    "take-commits-of-any-generation": 691,
    "take-the-isr-from-the-answer": 1,
    "truncate-to-the-high-watermark": 60,
    "unclean-restart-keeps-its-place-in-the-isr": 23,
}
IN_GROUPS = {
    "answer-a-coordinator-s-write-before-it-is-replicated",
    "coordinate-before-the-log-is-loaded",
    "give-partitions-that-others-still-own",
    "take-commits-of-any-generation",
}
IN_TRANSACTIONS = {
    "begin-anew-without-ending-what-is-open",
    "leave-what-the-coordinator-before-had-decided",
    "let-readers-past-open-transactions",
    "look-for-aborted-transactions-in-one-segment-only",
}
FOUND_IN_RAFT = {
    "commit-an-older-term-by-counting": 268,
    "forget-the-vote-on-restart": 29,
    "forget-the-term-on-restart": 29,
    "vote-twice-in-a-term": 3,
    "vote-for-a-shorter-log": 6,
    "vote-for-the-longer-log-of-an-older-term": 105,
    "skip-truncation-on-conflict": 1,
    "truncate-without-a-conflict": 1,
    "accept-without-looking-at-the-entry-before": 3,
    "reply-before-it-is-durable": 1,
    "vote-before-it-is-durable": 197,
    "count-its-own-log-before-it-is-durable": 1,
    "count-a-removed-voter": 3,
    "acknowledge-more-than-was-compared": 5,
    "commit-more-than-was-compared": 1,
    "read-by-an-answer-from-before": 36,
    "restore-the-first-voters-with-a-snapshot": 12,
    "never-send-again-what-was-lost": 1,
}


def cluster_seeds(name: str) -> Iterator[int]:
    """Seeds whose clusters have what the bug is in."""
    kinds = {Groups} if name in IN_GROUPS else {Transactions} if name in IN_TRANSACTIONS else set()
    fit = (seed for seed in count(1) if all(kind(seed).present for kind in kinds))
    return islice(fit, OTHER_CLUSTER_SEEDS)


def is_found(run: Callable[[int], object], seeds: Iterable[int]) -> bool:
    for seed in seeds:
        try:
            run(seed)
        except (Violation, Crashed, AssertionError):
            return True
    return False


def test_every_bug_planted_in_the_cluster_has_a_seed() -> None:
    assert FOUND_IN_CLUSTERS.keys() == cluster_mutants.MUTANTS.keys()


@pytest.mark.timeout(900)  # a busy machine that has to look for another seed
@pytest.mark.parametrize(("name", "seed"), FOUND_IN_CLUSTERS.items())
def test_a_bug_planted_in_the_cluster_is_found(name: str, seed: int) -> None:
    with cluster_mutants.planted(name):
        assert is_found(cluster_scenario.run_seed, (seed, *cluster_seeds(name)))


@pytest.mark.parametrize(("name", "seed"), FOUND_IN_RAFT.items())
def test_a_bug_planted_in_raft_is_found(name: str, seed: int) -> None:
    with mutants.planted(name):
        assert is_found(raft_scenario.run_seed, (seed, *range(1, OTHER_RAFT_SEEDS)))
