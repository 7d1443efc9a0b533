"""First in, first out for each key: a key lives in one partition, and a partition has one reader at a time.

Run: python examples/patterns/fifo_per_key.py [host:port]
"""

from common_ground import bootstrap, create, member, records, send

ACCOUNTS, STEPS = 5, 20


def main() -> None:
    with bootstrap() as servers:
        create(servers, "accounts", 4)
        moves = [(f"account-{account}", str(step)) for step in range(STEPS) for account in range(ACCOUNTS)]
        send(servers, "accounts", moves)
        readers = [member(servers, "ledger", "accounts") for _ in range(2)]
        history: dict[str, list[int]] = {}
        while sum(map(len, history.values())) < len(moves):
            for reader in readers:
                for message in records(reader):
                    steps = history.setdefault(message.key().decode(), [])
                    step = int(message.value())
                    if step not in steps:  # read again after a partition changed hands
                        steps.append(step)
        for reader in readers:
            reader.close()
    for account, steps in sorted(history.items()):
        assert steps == list(range(STEPS)), f"{account} is out of order: {steps}"
    print(f"{len(history)} accounts, {STEPS} moves each, all in order")


if __name__ == "__main__":
    main()
