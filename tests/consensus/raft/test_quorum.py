"""Quorum arithmetic agrees with the plain definitions, for every small set of voters."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from headrace.consensus.raft.quorum import Outcome, agreed_end, majority, outcome, reached

VOTERS = st.sets(st.integers(1, 9), min_size=1, max_size=7)


def test_any_two_majorities_share_a_voter_also_when_one_voter_comes_or_goes() -> None:
    for size in range(1, 7):
        voters = range(size)
        for other_size in (size, size + 1):
            for these in combinations(voters, majority(size)):
                for those in combinations(range(other_size), majority(other_size)):
                    assert set(these) & set(those)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7))
def test_the_agreed_end_is_the_largest_that_a_majority_has(ends: list[int]) -> None:
    end = agreed_end(ends)
    having = [sum(known >= candidate for known in ends) for candidate in (end, end + 1)]
    assert having[0] >= majority(len(ends)) > having[1]


@given(VOTERS, st.dictionaries(st.integers(1, 12), st.booleans()))
def test_a_vote_is_decided_when_the_missing_votes_cannot_change_it(
    voters: set[int], votes: dict[int, bool]
) -> None:
    granted = sum(votes.get(voter) is True for voter in voters)
    open_votes = sum(voter not in votes for voter in voters)
    needed = majority(len(voters))
    expected = Outcome.PENDING
    if granted >= needed:
        expected = Outcome.WON
    elif granted + open_votes < needed:
        expected = Outcome.LOST
    assert outcome(voters, votes) is expected


@given(VOTERS, st.sets(st.integers(1, 12)))
def test_those_who_do_not_vote_reach_nothing(voters: set[int], heard: set[int]) -> None:
    assert reached(voters, heard) is (len(voters & heard) >= majority(len(voters)))
