"""Bugs planted into replication are found by the village, each with a seed that found it."""

from typing import Any

import pytest

from headrace.cluster.partition_control import IsrProposal
from headrace.replication.follower import Follower
from headrace.replication.partition import Partition
from tests.replication.test_village import live
from tests.replication.village import Village


def count_only_the_isr(self: Partition) -> None:
    self._needed = tuple([f for f in self.followers.values() if f.node_id in self.isr])


def never_diverge(self: Partition, offset: int, last_epoch: int) -> None:
    return None


def join_from_anywhere(self: Partition, follower: Follower, eligible: Any) -> bool:
    return follower.node_id not in self.isr and eligible(follower.node_id, follower.broker_epoch)


propose = Partition.propose


def believe_the_proposal(self: Partition, *arguments: Any) -> IsrProposal | None:
    proposal = propose(self, *arguments)
    if proposal is not None:
        self.isr = tuple([node_id for node_id, _ in proposal.isr])
        self._hoped = frozenset(self.isr)
        self._count_needed()
        self.advance()
    return proposal


@pytest.mark.parametrize(
    ("name", "bug", "seed", "power_cuts"),
    [
        ("_count_needed", count_only_the_isr, 12, False),
        ("diverging", never_diverge, 0, True),
        ("wants_flush", property(lambda self: False), 0, True),
        ("may_join", join_from_anywhere, 2, False),
        ("propose", believe_the_proposal, 16, True),
    ],
    ids=["maximal isr", "divergence", "flush first", "caught up", "image alone"],
)
def test_a_planted_bug_is_found(monkeypatch, name, bug, seed, power_cuts):
    monkeypatch.setattr(Partition, name, bug)
    settings = {"flush_messages": "1"} if power_cuts else {}
    village = Village(seed, min_insync_replicas="2", **settings)

    def lead_a_life() -> None:
        village.run(500)
        live(village, 120, power_cuts=power_cuts)
        village.settle()

    with pytest.raises(AssertionError):
        lead_a_life()
