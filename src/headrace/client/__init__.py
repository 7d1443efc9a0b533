"""Connections, metadata, producer, consumer and admin of the Kafka protocol.

asyncio throughout. From the socket up: `transport` (frames over a socket, the one narrow edge), `connection`
(one broker, pipelined), `cluster` (metadata and the connection to each broker), then `producer`, `consumer`
(with `group` and its members) and `admin`. Configuration uses Kafka's own keys. The public names are in `headrace`.
"""
