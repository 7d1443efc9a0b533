"""`headrace serve --config`: the file of one node."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.cli.node_file import listener_address, read_node_file
from headrace.cli.parser import CommandError
from headrace.testing.ports import free_ports
from tests.cli.command import fails, succeeds

ROOT = Path(__file__).resolve().parents[2]


def test_dotted_keys_tables_and_lists_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        'node.id = 1\nlisteners = "PLAINTEXT://:9092"\nauto.create.topics.enable = false\n'
        '[controller.quorum]\nvoters = ["1@a:9092", "2@b:9092"]\n'
    )
    assert read_node_file(str(path)) == {
        "node.id": "1",
        "listeners": "PLAINTEXT://:9092",
        "auto.create.topics.enable": "false",
        "controller.quorum.voters": "1@a:9092,2@b:9092",
    }


def test_a_properties_file_of_kafka_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text("# a comment\nnode.id=3\nlog.dirs=/data\n")
    assert read_node_file(str(path)) == {"node.id": "3", "log.dirs": "/data"}


def test_listeners_name_one_address() -> None:
    assert listener_address("PLAINTEXT://0.0.0.0:9092") == ("0.0.0.0", 9092)
    assert listener_address("PLAINTEXT://:9092") == ("0.0.0.0", 9092)
    assert listener_address("PLAINTEXT://[::1]:9092") == ("::1", 9092)
    for bad in ("PLAINTEXT://a", "PLAINTEXT://a:b", "A://a:1,B://b:2", "A://a:70000"):
        with pytest.raises(CommandError, match="listeners"):
            listener_address(bad)


def test_what_is_wrong_with_the_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    assert "check --config" in fails(1, "serve", "--config", str(path))
    path.write_text("node.id 1\n")
    assert "is not TOML" in fails(1, "serve", "--config", str(path))
    path.write_text("no.such = 1\n")
    said = fails(2, "serve", "--config", str(path))
    assert str(path) in said and "no such broker setting" in said


def test_a_node_listens_and_keeps_its_data_where_its_file_says(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = tmp_path / "node.toml"
    path.write_text(
        f'node.id = 4\nlisteners = "PLAINTEXT://127.0.0.1:{port}"\nlog.dirs = "{tmp_path / "data"}"\n'
    )
    command = [sys.executable, "-m", "headrace", "serve", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == f"ready 127.0.0.1:{port}\n"
        assert (tmp_path / "data" / "meta.properties").exists()
        assert b'"id": 4' in succeeds("status", "--json", "-b", f"127.0.0.1:{port}")
        process.terminate()
        assert process.wait(60) == 0


def test_the_files_of_the_page_on_clusters_make_one_of_three_machines(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    (file,) = re.findall(r"```toml\n(node\.id = 1\n.*?)```", page, re.DOTALL)
    (differing,) = re.findall(r"The others differ in (.*?)\. ", page, re.DOTALL)
    assert set(re.findall(r"`([a-z.]+)`", differing)) == {"node.id", "advertised.listeners", "broker.rack"}
    ports = free_ports(3)
    bootstrap = ",".join(f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as machines:
        processes = []
        for number, port in enumerate(ports, 1):
            text = file.replace("node.id = 1\n", f"node.id = {number}\n")
            text = text.replace('rack = "a"', f'rack = "{"abc"[number - 1]}"')
            text = text.replace(
                "PLAINTEXT://node1.example:9092", f"PLAINTEXT://node{number}.example:{ports[number - 1]}"
            )
            text = text.replace("0.0.0.0:9092", f"127.0.0.1:{port}")
            for other, its_port in enumerate(ports, 1):
                text = text.replace(f"node{other}.example:9092", f"127.0.0.1:{its_port}")
                text = text.replace(f"node{other}.example", "127.0.0.1")
            text = text.replace("/var/lib/headrace", str(tmp_path / f"data-{number}"))
            path = tmp_path / f"node{number}.toml"
            path.write_text(text)
            command = [sys.executable, "-m", "headrace", "serve", "--config", str(path)]
            process = machines.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            machines.callback(process.kill)
            processes.append(process)
        for process, port in zip(processes, ports, strict=True):
            assert process.stdout is not None and process.stdout.readline() == f"ready 127.0.0.1:{port}\n"
        succeeds("topic", "create", "orders", "-b", bootstrap)
        succeeds("produce", "orders", "-b", bootstrap, stdin=b"one\n")
        processes[0].kill()
        processes[0].wait(60)
        left = ",".join(bootstrap.split(",")[1:])
        succeeds("produce", "orders", "-b", left, stdin=b"two\n")
        read = succeeds("consume", "orders", "--from", "earliest", "--exit-at-end", "-b", left)
        assert sorted(read.split()) == [b"one", b"two"]
        seen = json.loads(succeeds("status", "--json", "-b", left))
        assert [broker["controller"] != "none" for broker in seen["brokers"]] == [True, True, True]
        assert seen["partitions"] == {"total": 1, "offline": 0, "under_replicated": 1}
        for process in processes[1:]:
            process.terminate()
        assert [process.wait(60) for process in processes[1:]] == [0, 0]
