"""Small micro-batches, planned and read while Spark still writes down that there will be one.

Between asking where a batch ends and asking for its tasks, Spark writes its offset log, which takes longer than reading
a small batch. `Ahead` owns the thread that uses that time. Rows that were read by then go to Spark together with the
task, so that it needs no Python worker to read: that is how Spark's own `SimpleDataSourceStreamReader` works, and the
class behind it is the only way in (`HandsOverRows`). Invariants: what is taken is what was begun for the same offsets,
or nothing; whether rows go along depends on the offsets, the options and the records, so that a replay is cut into the
same tasks; a task can always read its ranges itself, so losing the rows loses nothing. Called by `source`.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from pyspark.sql import datasource_internal

T = TypeVar("T")

BYTES_MAX: Final = 4 * 1024 * 1024  # of rows that are held on the driver, by Spark's process and by this one
RANGES_MAX: Final = 32
RANGES_AT_ONCE_MAX: Final = 4
THREAD: Final = "read-ahead"


class _Unknown:
    """Stands for Spark's class where there is none of that name."""


# Spark asks readers of this class, which is its own and private, for rows as soon as they have answered with a task.
HandsOverRows: Any = getattr(datasource_internal, "_SimpleStreamReaderWrapper", _Unknown)
CAN_HAND_OVER: Final = HandsOverRows is not _Unknown


class Ahead(Generic[T]):
    """Work on one batch at a time, and small things after it, in a thread. Can be pickled: without the work."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._key: Any = None
        self._begun: Future[T] | None = None
        self._last: Future[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return dict.fromkeys(vars(self))

    def begin(self, key: Any, work: Callable[[], T]) -> None:
        """Begin with a batch; what was begun before is forgotten."""
        self._key, self._begun = key, self.after(work)

    def after(self, work: Callable[[], Any]) -> Future[Any]:
        """Do something after what was begun."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, THREAD)
        self._last = self._thread.submit(work)
        return self._last

    def take(self, key: Any) -> T | None:
        """What was made of a batch, once; None when another or none was begun. Raises what went wrong."""
        begun, self._begun = self._begun, None
        return begun.result() if begun is not None and self._key == key else None

    def settle(self) -> None:
        """Return when nothing is going on in the thread; what went wrong there is for those who take it."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def close(self) -> None:
        """Wait for the work and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._begun = self._last = None
