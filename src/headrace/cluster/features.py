"""The features that a cluster agrees on: which levels this release knows, and which one holds.

A feature changes how brokers and clients talk to each other, so it has one level for the whole cluster, kept in the
metadata log; as long as nothing is kept of it, its default holds. A level of 0 is a feature that is off. Decisions,
nothing else; ApiVersions tells of them, UpdateFeatures changes them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError

GROUP_VERSION = "group.version"
"""1 is the consumer group protocol of KIP-848, which is always there."""
METADATA_VERSION = "metadata.version"
"""What the cluster can be asked, by the number that Kafka gives its release of the same abilities: 25 is 4.0-IV3. There
is one format of the metadata log and so one level."""
TRANSACTION_VERSION = "transaction.version"


class Feature(NamedTuple):
    """The levels that this release knows."""

    first: int
    last: int
    default: int


FEATURES: Mapping[str, Feature] = {
    GROUP_VERSION: Feature(1, 1, 1),
    METADATA_VERSION: Feature(25, 25, 25),
    TRANSACTION_VERSION: Feature(0, 2, 2),
}


def level(kept: Mapping[str, int], name: str) -> int:
    """The level that holds."""
    return kept.get(name, FEATURES[name].default)


def finalized(kept: Mapping[str, int]) -> dict[str, int]:
    """All features that are on, with their levels."""
    return {name: found for name in FEATURES if (found := level(kept, name)) > 0}


def check_update(kept: Mapping[str, int], name: str, wanted: int, may_lower: bool) -> None:
    """KafkaError unless a feature may be given this level; 0 turns it off."""
    feature = FEATURES.get(name)
    if feature is None:
        raise KafkaError(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"Could not apply finalized feature update: {name} is not known.",
        )
    if not feature.first <= wanted <= feature.last:
        raise KafkaError(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"Invalid update version {wanted} for feature {name}. Levels {feature.first} to {feature.last} are "
            "supported.",
        )
    if wanted < level(kept, name) and not may_lower:
        raise KafkaError(
            ErrorCode.INVALID_UPDATE_VERSION,
            f"Can't downgrade the version of feature {name} without setting the upgrade type to safe or unsafe "
            "downgrade.",
        )
