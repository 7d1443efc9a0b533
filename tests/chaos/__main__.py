"""`python -m tests.chaos`: what `make chaos` runs.

python -m tests.chaos --seconds 600 --seed 7        five brokers, ten minutes, the schedule of seed 7
python -m tests.chaos --faults kill,pause           only faults whose name holds one of these words
python -m tests.chaos --against kafka               real Kafka by the launcher in $HEADRACE_PEERS, to check the checker

The exit status is 1 when there is a violation, a record without an answer, or a replica that does not come back.
"""

import argparse
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from tests.chaos.run import Outcome, run
from tests.chaos.schedule import schedule
from tests.chaos.systems import HeadraceSystem, KafkaSystem


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults go on (default: 600)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the schedule (default: a new one, printed)"
    )
    parser.add_argument("--brokers", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=200.0, help="records a second and writer (default: 200)"
    )
    parser.add_argument(
        "--copiers", type=int, default=2, help="transactional copiers of the topic into another (default: 2)"
    )
    parser.add_argument("--faults", help="comma-separated words; only faults whose name holds one of them")
    parser.add_argument("--against", choices=("headrace", "kafka"), default="headrace")
    parser.add_argument(
        "--logs", metavar="DIR", help="write the brokers' logs there when the run is not good"
    )
    options = parser.parse_args()
    # Told to end in the middle, it still ends its brokers and takes its disks away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: told to end"))
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    system: HeadraceSystem | KafkaSystem
    if options.against == "kafka":
        system = KafkaSystem(options.brokers)
    else:
        system = HeadraceSystem(options.brokers)
        if system.why_no_disks:
            print(f"chaos: without full disks: {system.why_no_disks}")
    faults = system.faults
    if options.faults:
        words = options.faults.split(",")
        faults = [fault for fault in faults if any(word in fault.value for word in words)]
    steps = schedule(seed, options.seconds, faults)
    print(f"chaos: seed {seed}, {options.seconds:.0f} s, {options.brokers} brokers, {len(steps)} faults:")
    for step in steps:
        print(f"  {step}")
    begun_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun_s:7.1f} s  {text}", flush=True)

    try:
        outcome = run(
            system,
            steps,
            say,
            partitions=options.partitions,
            writers=options.writers,
            rate=options.rate,
            copiers=options.copiers,
        )
        _print(outcome)
        if not outcome.good and options.logs and isinstance(system, HeadraceSystem):
            _keep_logs(system, Path(options.logs))
    finally:
        system.close()
    print(f"chaos: {'good' if outcome.good else 'NOT GOOD'}; again with SEED={seed}")
    return 0 if outcome.good else 1


def _print(outcome: Outcome) -> None:
    for line in outcome.account.lines():
        print(line)
    for problem in outcome.problems:
        print(f"PROBLEM {problem}")
    for note, count in sorted(outcome.notes.items()):
        print(f"note: {count} × {note}")
    print(f"longest time without an acknowledgement, by writer: {outcome.gaps_s}")


def _keep_logs(system: HeadraceSystem, place: Path) -> None:
    os.makedirs(place, exist_ok=True)
    for number, broker in system.cluster.brokers.items():
        (place / f"broker-{number}.log").write_text(broker.log())
    print(f"the brokers' logs are in {place}")


if __name__ == "__main__":
    sys.exit(main())
