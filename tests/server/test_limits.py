"""The limits of connections and requests, each by its named setting."""

import os
import resource
from pathlib import Path

import pytest

from headrace.testing import Broker
from headrace.wire.apis import Api
from tests.server.raw import RawClient, batch


def serving(client: RawClient) -> bool:
    return client.call(Api.API_VERSIONS, 0, {}).error_code == 0


def test_a_request_over_the_size_limit_closes_its_connection_only():
    with (
        Broker(settings={"socket.request.max.bytes": 20_000}) as broker,
        RawClient(broker.host, broker.port) as good,
        RawClient(broker.host, broker.port) as bad,
    ):
        good.create("t")
        bad.send_bytes((20_001).to_bytes(4, "big"))
        assert bad.closed()
        assert good.produce("t", batch(b"x" * 10_000)).error_code == 0


@pytest.mark.parametrize("setting", ["max.connections", "max.connections.per.ip"])
def test_connections_over_the_limit_are_closed_and_taken_again_when_others_go(setting):
    with Broker(settings={setting: 2}) as broker, RawClient(broker.host, broker.port) as first:
        with RawClient(broker.host, broker.port) as second, RawClient(broker.host, broker.port) as third:
            assert serving(first)
            assert serving(second)
            assert third.closed()
        for _ in range(1000):  # the broker learns of a close a moment after it
            with RawClient(broker.host, broker.port) as fourth:
                try:
                    assert serving(fourth)
                except (EOFError, OSError):
                    continue
                break
        else:
            pytest.fail("no connection was taken after two were closed")


def test_a_connection_that_sends_no_request_is_closed_in_time():
    with (
        Broker(settings={"connections.max.idle.ms": 300}) as broker,
        RawClient(broker.host, broker.port) as silent,
        RawClient(broker.host, broker.port) as half,
    ):
        half.send_bytes(b"\x00\x00")
        assert silent.closed()
        assert half.closed(), "a request that is never sent whole does not keep a connection"


def test_requests_wait_for_memory_that_others_hold_and_are_served_in_the_end():
    size = 200_000
    with Broker(settings={"queued.max.request.bytes": 100_000}) as broker:
        clients = [RawClient(broker.host, broker.port) for _ in range(4)]
        try:
            clients[0].create("t")
            for client in clients:
                client.send(
                    Api.PRODUCE,
                    8,
                    {
                        "acks": 1,
                        "timeout_ms": 1000,
                        "topic_data": [
                            {"name": "t", "partition_data": [{"index": 0, "records": batch(b"x" * size)}]}
                        ],
                    },
                )
            offsets = [c.receive().responses[0].partition_responses[0].base_offset for c in clients]
            assert sorted(offsets) == [0, 1, 2, 3]
        finally:
            for client in clients:
                client.__exit__()


def test_the_limit_of_connections_is_changed_while_the_broker_runs():
    with Broker() as broker, RawClient(broker.host, broker.port) as admin:
        change = {"name": "max.connections.per.ip", "config_operation": 0, "value": "1"}
        resource = {"resource_type": 4, "resource_name": "1", "configs": [change]}
        reply = admin.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
        assert [r.error_code for r in reply.responses] == [0]
        with RawClient(broker.host, broker.port) as second:
            assert second.closed()


def test_the_broker_takes_all_the_file_handles_it_may_have():
    with Broker() as broker:
        limits = Path(f"/proc/{broker.pid}/limits").read_text()
        (soft, hard) = next(
            line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files")
        )
        assert soft == hard


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_connections_that_there_are_no_file_handles_for_wait_without_using_up_the_cpu():
    with Broker() as broker, RawClient(broker.host, broker.port) as first:
        assert serving(first)
        handles = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (3, handles[1]))
        with RawClient(broker.host, broker.port) as second:
            before_s = _cpu_s(broker.pid)
            second._sock.settimeout(1.0)
            with pytest.raises(TimeoutError):
                second._sock.recv(1)
            assert _cpu_s(broker.pid) - before_s < 0.5
            assert serving(first)
            resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, handles)
            second._sock.settimeout(20.0)
            assert serving(second)
