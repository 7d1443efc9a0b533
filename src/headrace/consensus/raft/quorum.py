"""Quorum arithmetic: what a majority of voters has said, has stored, or has answered.

Pure functions over the voters and what is known of each; nothing here knows of terms, logs or messages. Invariant that
all of Raft rests on: any two majorities of one set of voters share a member, and so do a majority of a set and one of
the set with a single voter more or less. Called by elections and by the leader.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import Enum


class Outcome(Enum):
    """Where a vote stands."""

    PENDING = 0
    WON = 1
    LOST = 2


def majority(voters: int) -> int:
    """The least number of voters that is more than half of them."""
    assert voters > 0, "no voters, no majority"
    return voters // 2 + 1


def agreed_end(ends: Collection[int]) -> int:
    """The end of the longest prefix that a majority has, when each voter has everything below its own `end`."""
    ordered = sorted(ends, reverse=True)
    return ordered[majority(len(ordered)) - 1]


def outcome(voters: Collection[int], votes: Mapping[int, bool]) -> Outcome:
    """Whether these votes decide, counting each voter once and nobody else."""
    granted = refused = 0
    for voter in voters:
        vote = votes.get(voter)
        if vote is True:
            granted += 1
        elif vote is False:
            refused += 1
    needed = majority(len(voters))
    if granted >= needed:
        return Outcome.WON
    return Outcome.LOST if refused > len(voters) - needed else Outcome.PENDING


def reached(voters: Collection[int], heard: Iterable[int]) -> bool:
    """Whether those that were heard of include a majority of the voters."""
    return sum([1 for node in heard if node in voters]) >= majority(len(voters))
