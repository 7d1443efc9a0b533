"""Producer, Consumer and Admin that block instead of being awaited: the twins of those in `headrace`.

from headrace.blocking import Producer

with Producer(bootstrap_servers="127.0.0.1:9092") as producer:
    producer.send("orders", b"value", key=b"key").result()
"""

from headrace.client.blocking import Admin, Consumer, Producer, Transaction
from headrace.records.codec import Pending

__all__ = ["Admin", "Consumer", "Pending", "Producer", "Transaction"]
