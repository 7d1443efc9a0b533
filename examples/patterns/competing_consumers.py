"""Competing consumers: members of one group share the work, and each task is done by one of them.

Run: python examples/patterns/competing_consumers.py [host:port]
"""

from common_ground import bootstrap, create, member, records, send

TASKS = 60


def main() -> None:
    with bootstrap() as servers:
        create(servers, "tasks", 6)
        workers = {name: member(servers, "workers", "tasks") for name in ("anna", "ben", "cleo")}
        shares: dict[str, int] = {}
        while sorted(shares.values()) != [2, 2, 2]:  # until everybody has two of the six partitions
            for name, worker in workers.items():
                records(worker)
                shares[name] = len(worker.assignment())
        send(servers, "tasks", [(f"task-{number}", str(number)) for number in range(TASKS)])
        done: dict[str, list[str]] = {name: [] for name in workers}
        while sum(map(len, done.values())) < TASKS:
            for name, worker in workers.items():
                done[name] += [message.value().decode() for message in records(worker)]
        for worker in workers.values():
            worker.close()
    for name, tasks in done.items():
        print(f"{name} did {len(tasks)} tasks")
    assert sorted(int(task) for tasks in done.values() for task in tasks) == list(range(TASKS))
    print(f"{TASKS} tasks, each done once")


if __name__ == "__main__":
    main()
