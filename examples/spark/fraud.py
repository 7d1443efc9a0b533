"""The Python step of order_fraud.yaml: a count for each card, kept in Spark's state over batches and restarts."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

USUAL = 3


class Uses(StatefulProcessor):
    """Counts the orders of a card, and tells of each that comes after the usual ones."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._uses = handle.getValueState("uses", "count bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        count = self._uses.get()[0] if self._uses.exists() else 0
        for row in rows:
            count += 1
            if count > USUAL:
                yield Row(card=key[0], id=row.id, uses=count)
        self._uses.update((count,))

    def close(self) -> None:
        """Nothing is held open."""


def often_used(orders: DataFrame) -> DataFrame:
    """The orders of cards that were used more often than usual."""
    return orders.groupBy("card").transformWithState(
        statefulProcessor=Uses(),
        outputStructType="card string, id bigint, uses bigint",
        outputMode="Append",
        timeMode="None",
    )
