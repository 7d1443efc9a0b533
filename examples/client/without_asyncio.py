"""The same without asyncio: create a topic, send, read.

python examples/client/without_asyncio.py 127.0.0.1:9092 plain
"""

import sys

from headrace import NewTopic
from headrace.blocking import Admin, Consumer, Producer


def main(bootstrap: str, topic: str) -> None:
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(NewTopic(topic, partitions=1))
    with Producer(bootstrap_servers=bootstrap) as producer:
        pending = [producer.send(topic, b"%d" % number) for number in range(10)]
        print("last offset", pending[-1].result(30).offset)
    with Consumer(bootstrap_servers=bootstrap, group_id="plain", auto_offset_reset="earliest") as consumer:
        consumer.subscribe([topic])
        for record in consumer:
            if record.offset == 9:
                break
        print("read to offset", record.offset)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
