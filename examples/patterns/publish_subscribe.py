"""Publish and subscribe: every group gets everything, and none knows of the others.

Run: python examples/patterns/publish_subscribe.py [host:port]
"""

from common_ground import bootstrap, create, member, records, send

EVENTS = 20


def main() -> None:
    with bootstrap() as servers:
        create(servers, "events", 3)
        send(servers, "events", [(str(number), f"event {number}") for number in range(EVENTS)])
        for group in ("billing", "shipping", "archive"):
            reader = member(servers, group, "events")
            seen: list[str] = []
            while len(seen) < EVENTS:
                seen += [message.value().decode() for message in records(reader)]
            reader.close()
            print(f"{group} saw {len(set(seen))} events")


if __name__ == "__main__":
    main()
