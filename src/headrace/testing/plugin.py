"""The pytest plugin: fixtures `headrace`, `headrace_session` and `headrace_cluster`, and logs beside a failed test.

Owns the fixtures. Invariant: importing it loads nothing that pytest has not loaded already; a broker starts
only for a test that asks for one. Loaded by pytest through the entry point group `pytest11`.

    def test_orders(headrace):                                      # a fresh broker for this test
        Producer({"bootstrap.servers": headrace.bootstrap})

    @pytest.mark.headrace(settings={"num.partitions": 3})           # arguments of headrace.testing.Broker
    def test_spread(headrace): ...

    @pytest.mark.headrace(brokers=3)                                # ... and of headrace.testing.Cluster
    def test_failover(headrace_cluster):
        headrace_cluster.broker(1).kill()
"""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.testing.broker import Broker
    from headrace.testing.cluster import Cluster

LOG_SHOWN_BYTES = 16_384


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "headrace(**arguments): arguments of headrace.testing.Broker (Cluster) for the fixture `headrace`"
        " (`headrace_cluster`)",
    )


@pytest.fixture
def headrace(request: pytest.FixtureRequest) -> Iterator["Broker"]:
    """A fresh Headrace broker in memory, for one test: `.bootstrap`, `.host`, `.port`, `.create_topic(name)`."""
    from headrace.testing.broker import Broker

    marker = request.node.get_closest_marker("headrace")
    with Broker(**(marker.kwargs if marker else {})) as broker:
        yield broker


@pytest.fixture(scope="session")
def headrace_session() -> Iterator["Broker"]:
    """One Headrace broker in memory that all tests of the session share: use a topic of your own in each test."""
    from headrace.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def headrace_cluster(request: pytest.FixtureRequest) -> Iterator["Cluster"]:
    """A fresh Headrace cluster of three brokers, for one test: `.bootstrap`, `.broker(n)`, `.leader(topic)`."""
    from headrace.testing.cluster import Cluster

    marker = request.node.get_closest_marker("headrace")
    with Cluster(**(marker.kwargs if marker else {})) as cluster:
        yield cluster


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, "pytest.CallInfo[None]", None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if not report.failed:
        return
    for name in ("headrace", "headrace_session", "headrace_cluster"):
        broker = getattr(item, "funcargs", {}).get(name)
        if broker is not None and (log := broker.log(LOG_SHOWN_BYTES)):
            report.sections.append((f"Headrace broker log ({broker.bootstrap})", log))
