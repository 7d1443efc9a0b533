"""The name and id of the metadata log: the partition log, kept by Raft, from which the cluster's image is made."""

from typing import Final

TOPIC: Final = "__cluster_metadata"
PARTITION: Final = 0
TOPIC_ID: Final = (1).to_bytes(16, "big")  # Kafka's own for this topic
