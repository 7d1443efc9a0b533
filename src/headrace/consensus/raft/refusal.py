"""The one way a Raft node says no: an expected refusal with its Kafka error code, and who to ask instead."""

from headrace.base.errors import ErrorCode, KafkaError


class Refused(KafkaError):
    """The node cannot do what was asked of it; `leader` may, where that is known."""

    def __init__(self, code: ErrorCode, message: str, leader: int | None = None) -> None:
        super().__init__(code, message)
        self.leader = leader
