"""A shop for the demo: orders and payments into topics at a steady rate, and an account of what was acknowledged.

An order is written with its time; most are paid some seconds later, by a record in another topic. Now and then an order
is broken, as records of the world are. `Shop` runs in a thread until it is closed; what brokers acknowledged is kept,
so that whatever a pipeline makes of it can be held against it.
"""

import heapq
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from confluent_kafka import Producer

CUSTOMERS = 100
REGIONS = ("north", "south", "east", "west")
METHODS = ("card", "transfer", "voucher")
WINDOW_S = 5
PAID_SHARE = 0.9
PAID_AFTER_S = (0.2, 4.0)
BROKEN_EVERY = 500
PACE_ORDERS = 20
CLOSING_ID = -1
CLOSING_AHEAD = timedelta(hours=1)
CLOSING_PAUSE_S = 2.0


@dataclass(frozen=True)
class Order:
    """One order as it was written."""

    id: int
    customer: int
    cents: int
    at: datetime

    @property
    def region(self) -> str:
        return REGIONS[self.customer % len(REGIONS)]

    @property
    def cell(self) -> tuple[datetime, str]:
        """The window and region that this order is counted in."""
        second = self.at.replace(microsecond=0)
        return second - timedelta(seconds=second.timestamp() % WINDOW_S), self.region

    def json(self) -> bytes:
        return json.dumps(
            {"id": self.id, "customer": self.customer, "cents": self.cents, "at": self.at.isoformat()}
        ).encode()


@dataclass
class Ledger:
    """What brokers acknowledged."""

    orders: dict[int, Order] = field(default_factory=dict)
    paid: set[int] = field(default_factory=set)
    broken: set[bytes] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    @property
    def joined(self) -> set[int]:
        """The orders that have both been taken and been paid."""
        return self.paid & self.orders.keys()

    @property
    def cells(self) -> dict[tuple[datetime, str], tuple[int, int, int]]:
        """By window and region: how many orders, of how many cents, and the sum of their ids."""
        found: dict[tuple[datetime, str], Counter[str]] = {}
        for order in self.orders.values():
            sums = found.setdefault(order.cell, Counter())
            sums.update(orders=1, cents=order.cents, ids=order.id)
        return {cell: (sums["orders"], sums["cents"], sums["ids"]) for cell, sums in found.items()}


class Shop:
    """Writes orders and payments until closed."""

    def __init__(self, bootstrap: str, rate_per_s: int) -> None:
        self.ledger = Ledger()
        self.sent = 0
        self._rate_per_s = rate_per_s
        self._random = random.Random(7)
        self._closing = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 5,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what is due, then the record after which no window stays open; return when all is acknowledged."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        due: list[tuple[float, int]] = []
        begun_s = time.monotonic()
        number = 0
        while not self._closing.is_set():
            number += 1
            self._order(number, due)
            now_s = time.monotonic()
            while due and due[0][0] <= now_s:
                self._payment(heapq.heappop(due)[1])
            if number % PACE_ORDERS == 0:
                self._producer.poll(0)
                time.sleep(max(0.0, begun_s + number / self._rate_per_s - time.monotonic()))
        while due:
            self._payment(heapq.heappop(due)[1])
        self._producer.flush(60)
        time.sleep(CLOSING_PAUSE_S)  # so that no batch has the closing record but not all that came before it
        later = datetime.now(UTC) + CLOSING_AHEAD
        self._send("orders", Order(CLOSING_ID, 0, 0, later).json(), lambda: None)
        self._payment(CLOSING_ID, later)
        self._producer.flush(60)

    def _order(self, number: int, due: list[tuple[float, int]]) -> None:
        order = Order(
            number, self._random.randrange(CUSTOMERS), self._random.randrange(100, 20_000), datetime.now(UTC)
        )
        if number % BROKEN_EVERY == 0:
            value = b'{"id": %d, "customer": "?' % number
            self._send("orders", value, lambda: self.ledger.broken.add(value))
            return
        self._send("orders", order.json(), lambda: self.ledger.orders.update({number: order}))
        if self._random.random() < PAID_SHARE:
            heapq.heappush(due, (time.monotonic() + self._random.uniform(*PAID_AFTER_S), number))

    def _payment(self, number: int, at: datetime | None = None) -> None:
        paid_at = (at or datetime.now(UTC)).isoformat()
        value = json.dumps({"order_id": number, "method": self._random.choice(METHODS), "paid_at": paid_at})
        taken = (lambda: None) if number == CLOSING_ID else (lambda: self.ledger.paid.add(number))
        self._send("payments", value.encode(), taken)

    def _send(self, topic: str, value: bytes, taken) -> None:
        def report(error, message) -> None:
            if error:
                self.ledger.refused.append(str(error))
            else:
                taken()

        while True:
            try:
                self._producer.produce(topic, value, on_delivery=report)
                self.sent += 1
                return
            except BufferError:
                self._producer.poll(0.05)
