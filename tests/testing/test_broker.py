"""`headrace.testing.Broker`: a real broker for a test, which never outlives it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import KafkaError
from headrace.testing import Broker, BrokerFailed
from tests.testing.waiting import process_gone, wait_until


def topics_of(broker: Broker) -> list[str]:
    from headrace.client.admin import Admin

    async def names() -> list[str]:
        async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            return [topic.name for topic in await admin.list_topics()]

    return asyncio.run(names())


def test_a_broker_is_ready_when_the_block_begins_and_gone_when_it_ends() -> None:
    with Broker() as broker:
        pid = broker.pid
        host, port = broker.bootstrap.rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=5).close()
        broker.create_topic("orders", partitions=3)
        assert topics_of(broker) == ["orders"]
    assert process_gone(pid)


def test_two_brokers_live_beside_each_other() -> None:
    with Broker() as one, Broker() as two:
        assert one.port != two.port
        one.create_topic("only-here")
        assert topics_of(two) == []


def test_data_and_port_survive_a_crash_and_a_clean_restart(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path / "data") as broker:
        port = broker.port
        broker.create_topic("kept")
        broker.kill()
        assert not broker.running
        broker.start()
        assert (broker.port, topics_of(broker)) == (port, ["kept"])
        broker.restart()
        assert (broker.port, topics_of(broker)) == (port, ["kept"])


def test_a_temporary_data_directory_is_removed_at_the_end() -> None:
    with Broker(memory=False) as broker:
        assert broker.data_dir is not None and os.path.isdir(broker.data_dir)
    assert not os.path.exists(broker.data_dir)


def test_settings_reach_the_broker() -> None:
    with Broker(settings={"num.partitions": 4, "auto.create.topics.enable": False}) as broker:
        broker.create_topic("defaults", partitions=-1)

        from headrace.client.admin import Admin

        async def partitions() -> int:
            async with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
                (topic,) = await admin.describe_topics(["defaults"])
                return len(topic.partitions)

        assert asyncio.run(partitions()) == 4


def test_a_broker_that_cannot_start_says_why() -> None:
    with pytest.raises(BrokerFailed, match="no such broker setting"):
        Broker(settings={"no.such.setting": 1}).start()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BrokerFailed, match="in use"):
            Broker(port=taken.getsockname()[1]).start()


def test_a_broker_that_died_by_itself_is_reported() -> None:
    broker = Broker().start()
    os.kill(broker.pid, signal.SIGKILL)
    with pytest.raises(BrokerFailed, match="status -9"):
        broker.close()


def test_a_paused_broker_can_be_stopped() -> None:
    with Broker() as broker:
        broker.pause()


def test_topics_can_be_created_inside_a_running_event_loop() -> None:
    with Broker() as broker:

        async def body() -> None:
            broker.create_topic("from-a-coroutine")

        asyncio.run(body())
        assert topics_of(broker) == ["from-a-coroutine"]


def test_a_topic_that_is_refused_fails_the_test_with_that_error_alone() -> None:
    with Broker() as broker:
        with pytest.raises(KafkaError, match="no spaces") as refused:
            broker.create_topic("no spaces")
        assert refused.value.__context__ is None, "a trace that begins with another error sends people astray"


def test_memory_and_a_data_directory_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one or the other"):
        Broker(memory=True, data_dir=tmp_path)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_no_broker_outlives_the_process_that_started_it(end: str) -> None:
    program = (
        "import os, signal\n"
        "from headrace.testing import Broker\n"
        "broker = Broker().start()\n"
        "print(broker.pid, flush=True)\n"
        f"{end}\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(child.stdout)
    wait_until(lambda: process_gone(pid), "the broker ends with its owner")


def test_a_broker_outlives_the_thread_that_started_it() -> None:
    import threading

    broker = Broker()
    thread = threading.Thread(target=broker.start)
    thread.start()
    thread.join()
    with broker:
        broker.create_topic("still-there")


def test_loading_the_plugin_loads_neither_broker_nor_client() -> None:
    program = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import headrace.testing.plugin\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.strip() == "['headrace', 'headrace.testing', 'headrace.testing.plugin']"
