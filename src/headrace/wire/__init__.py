"""Kafka's wire protocol as values and bytes: framing, headers, versions, message codecs. No sockets."""
