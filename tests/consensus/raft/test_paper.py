"""The Raft paper, section by section: what "In Search of an Understandable Consensus Algorithm" says a node does.

The headings are those of the extended version; section 6 is in `test_thesis.py`, because voters change one at a time
here. Nodes are driven by hand; what nobody thought of is the simulator's to find.
"""

import pytest

from headrace.base.errors import ErrorCode
from headrace.consensus.raft.messages import (
    Append,
    AppendReply,
    Entry,
    HardState,
    Heartbeat,
    VoteReply,
    VoteRequest,
)
from headrace.consensus.raft.node import RaftNode, Role
from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from headrace.consensus.raft.storage import MemoryStorage
from tests.consensus.raft.bench import THREE, Bench, FixedChance, effects_of, make_node, only, terms_of

# -- 5.1 Raft basics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.CANDIDATE, Role.LEADER])
def test_a_node_of_an_older_term_takes_the_newer_one_and_follows(role: Role) -> None:
    bench = Bench(3)
    if role is Role.LEADER:
        bench.elect(1)
    elif role is Role.CANDIDATE:
        bench[1]._campaign(pre=False)
    assert bench[1].role is role
    bench[1].step(Heartbeat(1, 2, 7, 0, 1))
    assert (bench[1].role, bench[1].term, bench[1].leader) == (Role.FOLLOWER, 7, 2)


def test_a_message_of_an_older_term_changes_nothing_and_is_answered_with_the_term() -> None:
    node = make_node(term=5)
    node.step(Append(1, 2, 4, 0, 0, 0, [Entry(4, b"x")]))
    reply = only(effects_of(node), AppendReply)
    assert (reply.accepted, reply.term) == (False, 5)
    assert node.log.end == 0
    assert node.leader is None


# -- 5.2 Leader election ---------------------------------------------------------------------------------------


def test_a_node_begins_as_a_follower() -> None:
    assert make_node(term=3).role is Role.FOLLOWER


def test_a_leader_sends_heartbeats_to_everyone_at_every_interval() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.tick(1, bench.settings.heartbeat_ticks)
    assert [(type(m), m.to) for m in bench.messages] == [(Heartbeat, 2), (Heartbeat, 3)]


def test_a_follower_that_hears_its_leader_never_stands_for_election() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.tick_all(100)
    assert [bench[node].role for node in (1, 2, 3)] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert bench[1].term == 1


def test_a_follower_that_hears_nothing_stands_for_election_in_the_next_term() -> None:
    node = make_node(term=2)
    for _ in range(10):
        node.tick()
    assert node.role is Role.PRE_CANDIDATE
    asked = [(m.to, m.term, m.pre) for m in effects_of(node) if type(m) is VoteRequest]
    assert asked == [(2, 3, True), (3, 3, True)]
    node.step(VoteReply(1, 2, 3, True, pre=True))
    assert (node.role, node.term, node.vote) == (Role.CANDIDATE, 3, 1)


@pytest.mark.parametrize(
    ("size", "grants", "role"),
    [
        (1, 0, Role.LEADER),
        (3, 1, Role.LEADER),
        (3, 0, Role.CANDIDATE),
        (5, 1, Role.CANDIDATE),
        (5, 2, Role.LEADER),
    ],
)
def test_a_candidate_with_the_votes_of_a_majority_leads(size: int, grants: int, role: Role) -> None:
    node = make_node(voters=dict.fromkeys(range(1, size + 1), ""))
    node._campaign(pre=False)
    effects_of(node)
    for voter in range(2, 2 + grants):
        node.step(VoteReply(1, voter, 1, True))
    assert node.role is role


def test_a_candidate_counts_each_voter_once_and_nobody_else() -> None:
    node = make_node(voters=dict.fromkeys(range(1, 6), ""))
    node._campaign(pre=False)
    effects_of(node)
    for voter in (2, 2, 2, 77, 78):
        node.step(VoteReply(1, voter, 1, True))
    assert node.role is Role.CANDIDATE


@pytest.mark.parametrize(
    ("vote", "asking", "granted"), [(None, 2, True), (2, 2, True), (3, 2, False), (1, 2, False)]
)
def test_a_node_votes_for_one_candidate_a_term_first_come_first_served(
    vote: int | None, asking: int, granted: bool
) -> None:
    node = make_node(term=4, vote=vote)
    node.step(VoteRequest(1, asking, 4, 0, 0))
    assert only(effects_of(node), VoteReply).granted is granted


def test_a_candidate_that_hears_a_leader_of_its_term_follows_it() -> None:
    node = make_node()
    node._campaign(pre=False)
    node.step(Heartbeat(1, 3, 1, 0, 1))
    assert (node.role, node.leader, node.vote) == (Role.FOLLOWER, 3, 1)


def test_a_candidate_that_a_majority_refuses_follows_again() -> None:
    node = make_node()
    node._campaign(pre=False)
    effects_of(node)
    node.step(VoteReply(1, 2, 1, False))
    assert node.role is Role.CANDIDATE
    node.step(VoteReply(1, 3, 1, False))
    assert node.role is Role.FOLLOWER


def test_election_timeouts_are_spread_over_one_more_timeout() -> None:
    class Extreme(FixedChance):
        def randrange(self, stop: int, /) -> int:
            return stop - 1

    waits = []
    for chance in (FixedChance(0), Extreme(0)):
        node = RaftNode(1, THREE, MemoryStorage(), chance, RaftSettings(election_ticks=10))
        ticks = 0
        while node.role is Role.FOLLOWER:
            node.tick()
            ticks += 1
        waits.append(ticks)
    assert waits == [10, 19]


# -- 5.3 Log replication ---------------------------------------------------------------------------------------


def test_a_leader_appends_and_sends_at_once() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"x")
    appends = [(m.to, m.start, m.prev_term, [e.data for e in m.entries]) for m in bench.messages]
    assert appends == [(2, 1, 1, [b"x"]), (3, 1, 1, [b"x"])]


def test_an_entry_is_committed_when_a_majority_has_it_and_then_applied() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"x")
    bench.deliver(to=2)
    assert bench.hosts[1].applied == []
    bench.deliver(sender=2)
    assert bench.hosts[1].applied == [b"x"]
    assert bench.hosts[1].told == ["x committed"]


def test_followers_apply_what_the_leader_has_committed_in_order() -> None:
    bench = Bench(3)
    bench.elect(1)
    for data in (b"a", b"b", b"c"):
        bench.propose(1, data)
    bench.deliver()
    assert [bench.hosts[node].applied for node in (1, 2, 3)] == [[b"a", b"b", b"c"]] * 3


def test_an_append_behind_an_entry_that_is_not_there_is_refused() -> None:
    node = make_node([1, 1], term=2)
    node.step(Append(1, 2, 2, 5, 2, 0, []))
    reply = only(effects_of(node), AppendReply)
    assert (reply.accepted, reply.end, reply.last_term) == (False, 2, 1)


def test_an_append_behind_an_entry_of_another_term_is_refused_with_the_end_of_the_last_term_that_fits() -> (
    None
):
    node = make_node([1, 1, 2, 2, 2], term=4)
    node.step(Append(1, 2, 4, 5, 3, 0, []))
    reply = only(effects_of(node), AppendReply)
    assert (reply.accepted, reply.end, reply.last_term) == (False, 5, 2)
    node.step(Append(1, 2, 4, 4, 1, 0, []))
    reply = only(effects_of(node), AppendReply)
    assert (reply.accepted, reply.end, reply.last_term) == (False, 2, 1)


@pytest.mark.parametrize(
    ("start", "prev_term", "sent", "after"),
    [
        (2, 1, [], [1, 1, 2, 2]),
        (2, 1, [2], [1, 1, 2, 2]),
        (2, 1, [2, 2, 3], [1, 1, 2, 2, 3]),
        (2, 1, [3], [1, 1, 3]),
        (1, 1, [3, 3], [1, 3, 3]),
        (4, 2, [3], [1, 1, 2, 2, 3]),
        (0, 0, [3], [3]),
    ],
)
def test_conflicting_entries_go_and_only_those(
    start: int, prev_term: int, sent: list[int], after: list[int]
) -> None:
    node = make_node([1, 1, 2, 2], term=3)
    node.step(Append(1, 2, 3, start, prev_term, 0, [Entry(term, b"%d" % term) for term in sent]))
    assert terms_of(node) == after
    reply = only(effects_of(node), AppendReply)
    assert (reply.accepted, reply.end) == (True, start + len(sent))
    assert terms_of(node) == after


def test_a_follower_commits_no_more_than_it_has_compared() -> None:
    node = make_node([1, 1, 1, 1], term=2)
    node.step(Append(1, 2, 2, 2, 1, 4, []))
    assert node.log.commit == 2


@pytest.mark.parametrize(
    "follower",
    [
        [1],
        [],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
        [1, 1, 1, 4, 4, 4, 4],
        [1, 1, 1, 4, 4, 5, 5, 6, 6],
    ],
    ids=["short", "empty", "lost-terms", "extra-terms", "extra-entries", "same"],
)
def test_a_leader_brings_every_log_of_figure_7_into_line_with_its_own(follower: list[int]) -> None:
    bench = Bench(3)
    for node_id, terms in ((1, [1, 1, 1, 4, 4, 5, 5, 6, 6]), (2, follower), (3, [1])):
        host = bench.hosts[node_id]
        host.disk._durable.log = [Entry(term, b"%d.%d" % (term, at)) for at, term in enumerate(terms)]
        host.disk._durable.hard_state = HardState(6)
        host.start()
    bench.elect(1)
    bench.tick_all(10)
    assert bench[1].role is Role.LEADER
    assert terms_of(bench[2]) == terms_of(bench[1]) == [1, 1, 1, 4, 4, 5, 5, 6, 6, 7]
    assert bench.data(2) == bench.data(1)


# -- 5.4 Safety ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "end", "last_term", "granted"),
    [
        ([1, 1], 2, 1, True),
        ([1, 1], 3, 1, True),
        ([1, 1], 1, 1, False),
        ([1, 1], 1, 2, True),
        ([1, 2], 5, 1, False),
        ([], 0, 0, True),
    ],
)
def test_a_vote_is_granted_only_to_a_log_that_is_at_least_as_up_to_date(
    mine: list[int], end: int, last_term: int, granted: bool
) -> None:
    for pre in (True, False):
        node = make_node(mine, term=2)
        node.step(VoteRequest(1, 2, 3, end, last_term, pre=pre))
        assert only(effects_of(node), VoteReply).granted is granted


def test_an_entry_of_an_older_term_is_not_committed_by_counting() -> None:
    node = make_node([1, 1], term=1)
    node._campaign(pre=False)
    effects_of(node)
    node.step(VoteReply(1, 2, 2, True))
    effects_of(node)
    attempt = node.leadership.progress[2].attempt
    node.step(AppendReply(1, 2, 2, True, 2, attempt=attempt))
    assert node.log.commit == 0
    node.step(AppendReply(1, 2, 2, True, 3, attempt=attempt))
    assert node.log.commit == 3


# -- 5.5 Follower and candidate crashes; 5.6 Timing and availability -------------------------------------------


def test_a_message_that_comes_twice_has_the_effect_of_one() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"x")
    for message in list(bench.messages):
        bench.step(message)
    bench.deliver()
    assert bench.data(2) == [b"x"]
    assert bench.hosts[2].applied == [b"x"]


def test_term_vote_and_log_outlive_a_crash() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"x")
    bench.deliver()
    bench.hosts[2].crash()
    bench.hosts[2].start()
    node = bench[2]
    assert (node.term, node.vote, node.role) == (1, 1, Role.FOLLOWER)
    assert bench.data(2) == [b"x"]
    node.step(VoteRequest(2, 3, 1, 9, 9))
    assert only(effects_of(node), VoteReply).granted is False


def test_a_follower_that_was_away_catches_up_without_being_asked() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.hosts[3].crash()
    for number in range(20):
        bench.propose(1, b"%d" % number)
        bench.deliver()
    bench.hosts[3].start()
    bench.tick_all(10)
    assert bench.hosts[3].applied == [b"%d" % number for number in range(20)]


# -- 7 Log compaction ------------------------------------------------------------------------------------------


def test_a_snapshot_takes_the_place_of_the_log_and_of_the_state() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.isolate(3)
    bench.propose(1, b"a", b"b", b"c")
    bench.deliver()
    bench.hosts[1].snapshot()
    bench.cut.clear()
    bench.tick_all(10)
    log = bench[3].log
    assert (log.start, log.snapshot.end, bench.hosts[3].applied) == (4, 4, [b"a", b"b", b"c"])


def test_a_follower_that_has_the_entries_keeps_them_when_a_snapshot_comes() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"a", b"b")
    bench.deliver()
    bench.hosts[1].snapshot()
    bench[1].leadership.progress[3].send_snapshot(3)
    bench[1].leadership.replicate(3)
    bench.pump(bench.hosts[1])
    bench.deliver()
    assert bench.data(3) == [b"a", b"b"]
    assert bench[3].log.start == 0


# -- 8 Client interaction --------------------------------------------------------------------------------------


def test_a_node_that_does_not_lead_says_who_does() -> None:
    bench = Bench(3)
    bench.elect(1)
    for wish in (lambda n: n.propose([b"x"]), lambda n: n.read("r"), lambda n: n.transfer(2)):
        with pytest.raises(Refused) as refused:
            wish(bench[2])
        assert (refused.value.code, refused.value.leader) == (ErrorCode.NOT_CONTROLLER, 1)


def test_a_read_waits_for_an_entry_of_the_term_and_for_a_majority() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.propose(1, b"a")
    bench.deliver()
    bench.hosts[3].crash()
    bench[1].read("r")
    bench.pump(bench.hosts[1])
    assert bench.hosts[1].told == ["a committed"]
    bench.deliver()
    assert bench.hosts[1].told == ["a committed", "read r sees 2"]


def test_an_answer_that_was_under_way_before_a_read_does_not_confirm_it() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.tick(1, 2)
    bench.deliver(to=2)
    bench.deliver(to=3)
    bench[1].read("r")
    bench.pump(bench.hosts[1])
    bench.deliver(sender=2)
    bench.deliver(sender=3)
    assert bench.hosts[1].told == []


def test_a_read_of_a_leader_that_steps_down_is_lost() -> None:
    bench = Bench(3)
    bench.elect(1)
    bench.isolate(1)
    bench[1].read("r")
    bench.tick(1, 30)
    assert bench.hosts[1].told == ["read r sees None"]
