"""A broker and the controller it hears of, as far as no cluster of processes shows it."""

from headrace.cluster.control_messages import HeartbeatReply, RegisterReply, RegisterRequest
from headrace.cluster.registrant import Registrant


def test_a_controller_that_hears_of_no_majority_speaks_only_for_the_time_before() -> None:
    registrant = Registrant(RegisterRequest(1, b"i", "here", 9092, None, ""), [1], heartbeat_ms=100.0)
    registrant.next(0.0, 1)
    registrant.registered(RegisterReply(0, epoch=1, offset=0, cluster_id="c"), 1.0)
    registrant.applied(5, 1.0)
    assert registrant.next(200.0, 1) is not None
    registrant.heard(HeartbeatReply(0, fenced=False), 201.0)
    assert registrant.acknowledged_ms() == 200.0
    assert registrant.next(400.0, 1) is not None
    registrant.heard(HeartbeatReply(0, fenced=False, silence_ms=150.0), 401.0)
    assert registrant.acknowledged_ms() == 250.0
    assert registrant.next(600.0, 1) is not None
    registrant.heard(HeartbeatReply(0, fenced=False, silence_ms=500.0), 601.0)
    assert registrant.acknowledged_ms() == 250.0, "what was known stays known"
