"""`headrace serve --config`: the file of one node."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.node_file import listener_address, read_node_file
from headrace.cli.parser import CommandError
from headrace.testing.ports import free_ports
from tests.cli.command import fails, succeeds


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
