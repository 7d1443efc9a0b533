"""Help, wrong usage and configuration: what holds for every command."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS
from tests.cli.command import fails, headrace_command, succeeds

LEAVES = [
    *(("topic", action) for action in ("create", "list", "describe", "alter", "delete")),
    *(("config", action) for action in ("describe", "alter")),
    *(("bench", action) for action in ("produce", "consume", "latency")),
    *((name,) for name in COMMANDS),
]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_help_with_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    example = shown.partition("\nexample:\n")[2]
    assert f"headrace {words[0]}" in example
    assert shown.startswith(f"usage: headrace {' '.join(words)}")


@pytest.mark.parametrize(
    "words",
    [("topic", "list"), ("topic", "describe"), ("config", "describe"), ("consume",), ("doctor",)],
    ids=" ".join,
)
def test_every_listing_has_json(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.main import main

    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert "--json" in capsys.readouterr().out


def test_the_overview_names_every_command() -> None:
    shown = succeeds("--help").decode()
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_the_version_is_printed() -> None:
    from headrace import __version__

    assert succeeds("--version").decode() == f"headrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "usage: headrace"),
        (["serv"], "did you mean 'serve'?"),
        (["quota"], "not available in this version"),
        (["up", "--brokers", "0"], "from 1 to 100"),
        (["partition", "reassign", "t"], "give one of --to, --drain"),
        (["partition", "reassign", "t", "--to", "1,1"], "named twice"),
        (["broker", "kill"], "required: N"),
        (["topic"], "required: ACTION"),
        (["topic", "create"], "required: NAME"),
        (["topic", "create", "t", "-p", "0"], "expected a whole number from 1 up, got 0"),
        (["topic", "create", "t", "-p", "many"], "expected a whole number, got 'many'"),
        (["topic", "create", "t", "-c", "retention"], "expected key=value, got 'retention'"),
        (["topic", "list", "--jso"], "unrecognized arguments: --jso\ntry 'headrace topic list --help'"),
        (["doctor", "--jso"], "unrecognized arguments: --jso\ntry 'headrace doctor --help'"),
        (["topic", "alter", "t"], "nothing to alter"),
        (["topic", "list", "-X", "linger.mss=1"], "did you mean linger.ms?"),
        (["topic", "list", "-X", "sasl.mechanism=PLAIN"], "security is not supported by this client yet"),
        (["topic", "list", "-X", "security.protocol=SSL"], "SSL is not supported by this client yet"),
        (["topic", "list", "-b", "nowhere"], "expected HOST:PORT"),
        (
            ["consume", "t", "--from", "yesterday"],
            "--from yesterday: expected earliest, latest, an offset, or a time",
        ),
        (["consume"], "required: TOPIC"),
        (["produce", "t", "--acks", "2"], "invalid choice: '2'"),
        (["produce", "t", "--key-separator", ""], "at least one character"),
        (["config", "describe", "tpoic", "x"], "invalid choice: 'tpoic'"),
        (["config", "alter", "topic", "x"], "nothing to alter"),
        (["serve", "--memory", "--data", "x"], "not allowed with argument"),
        (["serve", "--port", "65536"], "from 0 to 65535"),
        (["serve", "--set", "num.partition=3"], "did you mean 'num.partitions'?"),
        (["serve", "--set", "num.partitions=x"], "num.partitions"),
        (["serve", "--set", "num.partitions"], "expected key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.main import main

    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert status == 2
    assert says in shown.err
    assert shown.out == ""


def test_a_cluster_that_is_not_there_ends_with_status_1_and_the_next_step() -> None:
    shown = fails(1, "topic", "list", "-b", "127.0.0.1:1")
    assert "cannot connect to 127.0.0.1:1: connection refused" in shown
    assert "headrace serve" in shown


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "says nothing"])
@pytest.mark.parametrize("arguments", [("topic", "list"), ("produce", "t")], ids=" ".join)
def test_a_port_that_is_not_kafkas_is_named_with_what_to_check(
    arguments: tuple[str, ...], closes: bool
) -> None:
    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:  # the error ends the test's thread
            while True:
                taken = held.enter_context(listener.accept()[0])
                if closes:
                    taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        key = ("-X", "socket.connection.setup.timeout.ms=1000")
        try:
            shown = fails(1, *arguments, "-b", address, *key, stdin=b"x\n")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
    assert address in shown
    assert "check that the port is a Kafka listener without TLS" in shown


def test_a_properties_file_gives_client_keys(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "client.properties"
    bootstrap = env["HEADRACE_BOOTSTRAP"]
    file.write_text(f"# mine\n! too\n\nbootstrap.servers = {bootstrap}\nclient.id: me\\\nself\n")
    nowhere = {"HEADRACE_BOOTSTRAP": "127.0.0.1:1"}
    assert succeeds("topic", "list", "--json", "--config", str(file), env=nowhere).startswith(b"[")
    file.write_text("no equals sign\n")
    assert "line 1: expected key=value" in fails(1, "topic", "list", "--config", str(file))
    missing = fails(1, "topic", "list", "--config", str(tmp_path / "missing"))
    assert "cannot read" in missing and "check --config" in missing


def test_an_option_wins_over_the_file_and_the_environment(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=127.0.0.1:1\n")
    nowhere = {"HEADRACE_BOOTSTRAP": "127.0.0.1:1"}
    arguments = ("topic", "list", "--config", str(file), "-b", env["HEADRACE_BOOTSTRAP"])
    assert succeeds(*arguments, env=nowhere).startswith(b"TOPIC")


def test_a_key_that_a_command_has_no_use_for_is_named(env: dict[str, str]) -> None:
    done = headrace_command("topic", "list", "-X", "acks=all", env=env)
    assert done.returncode == 0
    assert b"note: acks has no effect" in done.stderr


def test_a_file_that_other_programs_use_too_does_no_harm(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "client.properties"
    theirs = (
        "group.id",
        "enable.auto.commit",
        "session.timeout.ms",
        "transactional.id",
        "value.deserializer",
    )
    file.write_text("".join(f"{name}={'true' if 'auto' in name else 10}\n" for name in theirs))
    done = headrace_command("topic", "list", "--config", str(file), env=env)
    assert done.returncode == 0
    assert [f"note: {name} has no effect".encode() in done.stderr for name in theirs] == [True] * 5
    assert "expected a whole number" in fails(2, "topic", "list", "-X", "linger.ms=soon", env=env)


def test_serve_loads_neither_client_nor_drawing() -> None:
    program = (
        "import sys\n"
        "import headrace.cli.main, headrace.cli.serve, headrace.server.main\n"
        "heavy = {'rich', 'typer', 'headrace.client', 'kio', 'confluent_kafka', 'pytest'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_a_terminal_gets_a_drawn_table_and_a_pipe_plain_text(env: dict[str, str]) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "headrace", "topic", "list"]
        subprocess.run(
            command, stdout=theirs, check=True, timeout=60, env={**os.environ, **env, "TERM": "xterm"}
        )
        os.close(theirs)
        drawn = terminal.read(65_536)
    assert "─".encode() in drawn
    assert succeeds("topic", "list", env=env).startswith(b"TOPIC  ")


def test_the_cluster_may_be_named_before_or_after_the_action(env: dict[str, str]) -> None:
    bootstrap, nowhere = env["HEADRACE_BOOTSTRAP"], {"HEADRACE_BOOTSTRAP": "127.0.0.1:1"}
    assert succeeds("topic", "-b", bootstrap, "list", env=nowhere).startswith(b"TOPIC")
    assert succeeds("topic", "-b", "127.0.0.1:1", "list", "-b", bootstrap, env=nowhere).startswith(b"TOPIC")
