"""`headrace serve`, `bench` and `doctor`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.doctor import _java_major, findings_for
from tests.cli.command import fails, headrace_command, succeeds
from tests.testing.waiting import process_gone, wait_until


def serve(*arguments: str, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_prints_one_ready_line_and_stops_cleanly_on_a_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    with serve("--data", str(tmp_path / "data"), "--port", "0") as process:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        host, port = address.split(":")
        assert (word, host) == ("ready", "127.0.0.1") and int(port) > 0
        succeeds("topic", "create", "t", "-b", address)
        process.send_signal(number)
        assert process.stdout.read() == ""
        assert process.wait(60) == 0


def test_the_data_directory_comes_from_the_environment_or_is_in_the_working_directory(tmp_path: Path) -> None:
    for env, expected in (({"HEADRACE_DATA": str(tmp_path / "named")}, "named"), ({}, ".headrace")):
        clean = {name: value for name, value in os.environ.items() if name != "HEADRACE_DATA"}
        with serve("--port", "0", cwd=tmp_path, env={**clean, **env}) as process:
            assert process.stdout is not None and process.stdout.readline().startswith("ready ")
            assert (tmp_path / expected).is_dir()
            process.terminate()


def test_memory_leaves_nothing_on_disk(tmp_path: Path) -> None:
    with serve("--memory", "--port", "0", cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("ready ")
        process.terminate()
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_and_a_locked_directory_are_said(tmp_path: Path) -> None:
    with serve("--data", str(tmp_path / "data"), "--port", "0") as process:
        assert process.stdout is not None
        port = process.stdout.readline().split(":")[1].strip()
        assert "in use" in fails(1, "serve", "--memory", "--port", port)
        assert str(tmp_path / "data") in fails(1, "serve", "--data", str(tmp_path / "data"), "--port", "0")
        process.terminate()


def test_a_data_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a directory; name one with --data" in fails(
        1, "serve", "--data", str(tmp_path / "file"), "--port", "0"
    )


def test_serve_stops_when_its_input_ends_if_asked_to() -> None:
    env = {**os.environ, "HEADRACE_STOP_ON_STDIN_EOF": "1"}
    with serve("--memory", "--port", "0", stdin=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().startswith("ready ")
        process.stdin.close()
        wait_until(lambda: process_gone(process.pid), "the broker ends with its input")
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    "arguments, measures",
    [
        (
            ("produce", "--records", "2000", "--compression", "lz4"),
            {"records_per_s", "megabytes_per_s", "seconds"},
        ),
        (
            ("consume", "--records", "2000", "--partitions", "2"),
            {"records_per_s", "megabytes_per_s", "seconds"},
        ),
        (("latency", "--rate", "200", "--seconds", "1"), {"p50_ms", "p99_ms", "p999_ms", "max_ms"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bench_measures_and_cleans_up(
    arguments: tuple[str, ...], measures: set[str], env: dict[str, str]
) -> None:
    bootstrap = env["HEADRACE_BOOTSTRAP"]
    report = json.loads(succeeds("bench", *arguments, "--against", bootstrap, "--json"))
    assert report["workload"] == arguments[0]
    assert report["bootstrap"] == bootstrap
    assert all(report[name] > 0 for name in measures)
    assert "headrace-bench" not in succeeds("topic", "list", env=env).decode()


def test_bench_prints_a_table_for_people(env: dict[str, str]) -> None:
    shown = succeeds("bench", "produce", "--records", "500", env=env).decode()
    assert shown.startswith("MEASURE") and "records per s" in shown


def test_the_doctor_looks_at_everything_and_advises_on_every_lack(tmp_path: Path) -> None:
    done = headrace_command("doctor", "--data", str(tmp_path / "data"), "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    findings = {item["check"]: item for item in json.loads(done.stdout)}
    assert set(findings) == {
        "python",
        "record codec",
        "event loop",
        "data directory",
        "fsync latency",
        "free space",
        "open files",
        "broker ports",
        "gateway ports",
        "java",
    }
    for item in findings.values():
        assert item["status"] in ("ok", "warn")
        assert bool(item["advice"]) == (item["status"] != "ok"), item
    assert list(tmp_path.iterdir()) == [], "looking must not leave anything behind"


def test_the_doctor_finds_taken_ports_and_a_directory_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.cli import doctor

    monkeypatch.setattr(doctor, "_free", lambda port: port != 9093)
    monkeypatch.setattr(
        doctor, "_fsync_ms", lambda place: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    findings = {finding.check: finding for finding in findings_for("/nowhere")}
    assert findings["broker ports"].status == "warn" and "9093" in findings["broker ports"].found
    assert (
        findings["data directory"].status == "bad" and "permission denied" in findings["data directory"].found
    )


@pytest.mark.parametrize(
    "line, major",
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ("what?", None),
        ("", None),
    ],
)
def test_the_doctor_reads_javas_version(line: str, major: int | None) -> None:
    assert _java_major(line) == major
