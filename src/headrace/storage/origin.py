"""Where an append comes from, which decides how much of it is checked. Used by the log and its parts."""

from enum import IntEnum


class Origin(IntEnum):
    """Who hands batches to a partition log."""

    CLIENT = 0
    """A Produce request: everything is validated, offsets are assigned here."""
    COORDINATOR = 1
    """A coordinator of this broker: control batches allowed, no sequence numbers, producer epochs checked."""
    REPLICA = 2
    """A leader or the log itself at recovery: already validated, offsets already assigned."""
