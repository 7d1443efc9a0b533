"""Real brokers for tests: a context manager, and a pytest plugin built on it.

Owns: starting `python -m headrace serve` as a child process, waiting until it is ready, and ending it.
Invariant: no broker outlives the process that started it, however that process dies. Users call it from their
tests:

    def test_orders(headrace):                      # pytest fixture, a fresh broker in memory
        producer = Producer({"bootstrap.servers": headrace.bootstrap})

    with headrace.testing.Broker() as broker: ...   # the same without pytest
    with headrace.testing.Cluster(3) as cluster: ...  # several brokers, to be killed, paused and cut off

Names are loaded on first use, so that having the plugin installed costs a pytest run nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.testing.broker import Broker, BrokerFailed
    from headrace.testing.cluster import Cluster

__all__ = ["Broker", "BrokerFailed", "Cluster"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from headrace.testing import broker, cluster

        return getattr(cluster if name == "Cluster" else broker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
