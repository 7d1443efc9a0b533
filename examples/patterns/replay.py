"""Replay: a group that has read everything goes back, by its offsets, and reads again from where it is told to.

Run: python examples/patterns/replay.py [host:port]
"""

from common_ground import bootstrap, create, member, records, send
from confluent_kafka import Consumer, TopicPartition

READINGS = 30


def read(servers: str, expected: int) -> list[int]:
    reader = member(servers, "model", "readings")
    seen: list[int] = []
    while len(seen) < expected:
        seen += [int(message.value()) for message in records(reader)]
    reader.close()  # commits how far it came
    return seen


def go_back(servers: str, offset: int) -> None:
    """What `headrace group reset model --to OFFSET` does: commit another offset while nobody reads."""
    admin = Consumer({"bootstrap.servers": servers, "group.id": "model", "log_level": 0})
    admin.commit(offsets=[TopicPartition("readings", 0, offset)], asynchronous=False)
    admin.close()


def main() -> None:
    with bootstrap() as servers:
        create(servers, "readings", 1)
        send(servers, "readings", [("sensor", str(number)) for number in range(READINGS)])
        print(f"read {len(read(servers, READINGS))} readings")
        go_back(servers, 10)
        again = read(servers, READINGS - 10)
        assert again == list(range(10, READINGS))
        print(f"read {len(again)} of them again, from offset 10")


if __name__ == "__main__":
    main()
