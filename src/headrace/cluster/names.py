"""Which names a topic may have, and which topics are the cluster's own.

Kafka's rules, because names become directories and metric names on every broker: 1 to 249 ASCII letters, digits, dots,
underscores and hyphens, and no two topics that differ only in a dot for an underscore.
"""

from collections.abc import Iterable

from headrace.base.errors import ErrorCode, KafkaError

TOPIC_NAME_LENGTH_MAX = 249
CLUSTER_METADATA_TOPIC = "__cluster_metadata"
CONSUMER_OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTION_STATE_TOPIC = "__transaction_state"
INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC, "__share_group_state"})

_LEGAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def is_internal(name: str) -> bool:
    """Whether a topic is kept by the cluster itself, for its groups and transactions."""
    return name in INTERNAL_TOPICS


def check_topic_name(name: str) -> None:
    """INVALID_TOPIC_EXCEPTION, with the reason, unless a topic may have this name."""
    if not name:
        reason = "the empty string is not allowed"
    elif name in (".", ".."):
        reason = f"'{name}' is not allowed"
    elif len(name) > TOPIC_NAME_LENGTH_MAX:
        reason = f"the length of '{name}' is longer than the max allowed length {TOPIC_NAME_LENGTH_MAX}"
    elif not _LEGAL.issuperset(name):
        reason = f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    else:
        return
    raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {reason}")


class Collisions:
    """The names taken when dots and underscores are the same, gathered from all topics on the first question."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._taken: dict[str, str] | None = None

    def check(self, name: str) -> None:
        """INVALID_TOPIC_EXCEPTION when another topic would be told apart from this one by a dot or underscore only."""
        if "." not in name and "_" not in name:
            return
        if self._taken is None:
            self._taken = {_folded(taken): taken for taken in self._names if "." in taken or "_" in taken}
        taken = self._taken.setdefault(_folded(name), name)
        if taken != name:
            raise KafkaError(
                ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic '{name}' collides with existing topic: {taken}"
            )


def _folded(name: str) -> str:
    return name.replace(".", "_")
