"""What the Raft thesis adds to the paper: voters that change one at a time, transfer, check-quorum, pre-vote.

The headings are chapters of "Consensus: Bridging Theory and Practice". Nodes are driven by hand, as in `test_paper.py`.
"""

import pytest

from headrace.base.errors import ErrorCode
from headrace.consensus.raft.messages import EntryKind, Follow, TransferNow, VoteReply, VoteRequest
from headrace.consensus.raft.node import Role
from headrace.consensus.raft.refusal import Refused
from tests.consensus.raft.bench import Bench, effects_of, make_node

# -- 4 Cluster membership changes, and observers ---------------------------------------------------------------


def test_only_one_change_of_voters_is_open_at_a_time() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench[1].remove_voter(3)
    with pytest.raises(Refused) as refused:
        bench[1].remove_voter(2)
    assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_no_change_of_voters_before_an_entry_of_the_term_is_committed() -> None:
    node = make_node()
    node._campaign(pre=False)
    effects_of(node)
    node.step(VoteReply(1, 2, 1, True))
    assert node.role is Role.LEADER
    with pytest.raises(Refused):
        node.remove_voter(3)


def test_voters_are_in_force_as_soon_as_they_are_in_the_log() -> None:
    bench = Bench(4)
    bench.elect(1)
    bench.isolate(3)
    bench.isolate(4)
    bench[1].remove_voter(4)
    bench.pump(bench.hosts[1])
    bench.deliver()
    assert bench[1].log.commit == bench[1].log.end, "two of the three that are left have it"


def test_voters_of_an_entry_that_is_replaced_are_in_force_no_more() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.isolate(1)
    bench[1].remove_voter(3)
    bench.pump(bench.hosts[1])
    assert sorted(bench[1].voters) == [1, 2]
    bench.elect(2)
    bench.cut.clear()
    bench.tick_all(10)
    assert sorted(bench[1].voters) == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda node: node.add_voter(2, ""), ErrorCode.DUPLICATE_VOTER),
        (lambda node: node.remove_voter(9), ErrorCode.VOTER_NOT_FOUND),
        (lambda node: node.add_voter(9, ""), ErrorCode.REQUEST_TIMED_OUT),
        (lambda node: node.transfer(9), ErrorCode.VOTER_NOT_FOUND),
    ],
    ids=["add a voter", "remove no voter", "add one without the log", "hand over to no voter"],
)
def test_a_change_that_makes_no_sense_is_refused(change, code: ErrorCode) -> None:
    bench = Bench(3)
    bench.elect(1)
    with pytest.raises(Refused) as refused:
        change(bench[1])
    assert refused.value.code is code


def test_the_last_voter_cannot_be_removed() -> None:
    bench = Bench(1)
    bench.tick(1)
    assert bench[1].role is Role.LEADER
    with pytest.raises(Refused) as refused:
        bench[1].remove_voter(1)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


def test_a_voter_can_be_spared_when_a_majority_of_the_others_answers() -> None:
    bench = Bench(3)
    bench.elect(1)
    assert not bench[1].leadership.can_spare(3), "who is there is not known yet"
    bench.tick_all(2)
    assert bench[1].leadership.can_spare(2) and bench[1].leadership.can_spare(3)
    bench.isolate(2)
    bench.tick_all(20)
    assert bench[1].leadership.can_spare(2)
    assert not bench[1].leadership.can_spare(3)


def test_a_leader_knows_for_how_long_it_has_heard_of_no_majority() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.tick_all(20)
    leadership = bench[1].leadership
    assert leadership.silence_ticks == 0
    bench.isolate(2)
    bench.tick_all(20)
    assert leadership.silence_ticks == 0, "two of three are there"
    bench.isolate(3)
    before = leadership._now
    while bench[1].leadership is leadership and leadership._now - before < 8:
        bench.tick(1)
    assert leadership.silence_ticks >= leadership._now - before > 0


def test_a_voter_that_missed_its_removal_learns_of_it_and_disturbs_nobody() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.isolate(3)
    bench[1].remove_voter(3)
    bench.pump(bench.hosts[1])
    bench.tick_all(200)  # long enough for the leader to have forgotten it
    assert 3 not in bench[1].leadership.progress
    bench.cut.clear()
    bench.tick_all(60)
    assert sorted(bench[3].voters) == [1, 2]
    assert (bench[1].role, bench[1].term, bench[3].role) == (Role.LEADER, 1, Role.FOLLOWER)


def test_an_observer_is_sent_the_log_and_never_stands_for_election() -> None:
    bench = Bench(2, observers=(7,))
    bench.elect(1)
    bench.propose(1, b"x")
    bench.tick_all(60)
    assert bench.hosts[7].applied == [b"x"]
    bench.isolate(7)
    bench.tick_all(60)
    assert (bench[7].role, bench[7].term) == (Role.FOLLOWER, 1)


def test_observers_do_not_count_for_commitment() -> None:
    bench = Bench(3, observers=(7, 8))
    bench.elect(1)
    bench.tick_all(30)
    bench.isolate(2)
    bench.isolate(3)
    bench.cut -= {(1, 7), (7, 1), (1, 8), (8, 1)}
    bench.propose(1, b"x")
    bench.deliver()
    assert bench.data(7) == [b"x"]
    assert bench[1].log.commit == 1


def test_a_follower_passes_on_that_an_observer_wants_the_log() -> None:
    bench = Bench(3, observers=(7,))
    bench.elect(1)
    bench.step(Follow(2, 7, 0))
    bench.deliver()
    assert bench[7].leader == 1


# -- 3.10 Leadership transfer; 6.2 Check-quorum; 9.6 Pre-vote ---------------------------------------------------


def test_a_node_that_asks_in_advance_enters_no_term_and_makes_nobody_enter_it() -> None:
    bench = Bench(3)
    bench[1].campaign()
    bench.pump(bench.hosts[1])
    bench.deliver(to=2)
    assert (bench[1].term, bench[2].term, bench[2].vote) == (0, 0, None)


@pytest.mark.parametrize("pre", [True, False])
def test_a_follower_that_hears_its_leader_does_not_even_notice_a_candidate(pre: bool) -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.step(VoteRequest(2, 3, 9, 100, 9, pre=pre))
    assert (bench[2].term, bench[2].leader, list(bench.messages)) == (1, 1, [])


def test_an_election_that_the_leader_asked_for_goes_through() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench[1].transfer(3)
    bench.pump(bench.hosts[1])
    bench.deliver()
    assert [bench[node].leader for node in (1, 2, 3)] == [3, 3, 3]


def test_a_request_to_be_elected_from_an_older_term_is_ignored() -> None:
    node = make_node(term=4)
    node.step(TransferNow(1, 2, 3))
    assert (node.role, node.term) == (Role.FOLLOWER, 4)


def test_a_leader_that_hears_no_majority_steps_down_and_one_that_does_goes_on() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.isolate(3)
    bench.tick_all(60)
    assert bench[1].role is Role.LEADER
    bench.isolate(2)
    bench.tick(1, 30)
    assert bench[1].role is not Role.LEADER


def test_the_first_entry_of_a_term_restates_the_voters() -> None:
    bench = Bench(3)
    bench.elect(2)
    [entry] = bench[1].log.entries(0, 1, 100)
    assert entry.kind == EntryKind.LEADER
    assert sorted(bench[1].membership.at(1)) == [1, 2, 3]
