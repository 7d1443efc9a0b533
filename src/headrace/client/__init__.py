"""Connections, metadata, producer, consumer and admin of the Kafka protocol."""
