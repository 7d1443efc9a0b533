"""Apache Kafka's own command-line tools: where they are, how one is run, and its consumer as a member of a group.

They are found as `kafka-topics` or `kafka-topics.sh` on the PATH, in `$KAFKA_HOME/bin`, or through
`HEADRACE_KAFKA_TOOLS`, a command that takes the tool's name and its arguments.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from typing import IO

import pytest

from tests.compat.group_clients import Member

JVM_S = 90.0
QUICK_JVM = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "NO_COLOR": "1"}


def tool_command(name: str) -> list[str] | None:
    """How one of Kafka's tools is started here, or None."""
    if launcher := os.environ.get("HEADRACE_KAFKA_TOOLS"):
        return [*shlex.split(launcher), name]
    path = os.pathsep.join([os.environ["PATH"], f"{os.environ.get('KAFKA_HOME', '')}/bin"])
    found = shutil.which(name, path=path) or shutil.which(f"{name}.sh", path=path)
    return [found] if found else None


WITH_TOOLS = pytest.mark.skipif(
    tool_command("kafka-topics") is None,
    reason="Kafka's own tools are not installed: put them on the PATH or set KAFKA_HOME or HEADRACE_KAFKA_TOOLS",
)


def run_tool(name: str, *arguments: str, stdin: str = "", status: int = 0) -> str:
    command = tool_command(name)
    assert command is not None
    done = subprocess.run(
        [*command, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=JVM_S,
        check=False,
        env={**os.environ, **QUICK_JVM},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


class Java(Member):
    """Kafka's verifiable consumer, which tells what it does line by line."""

    def consume(self) -> None:
        command = tool_command("kafka-verifiable-consumer")
        assert command is not None
        options = {
            "bootstrap-server": self.bootstrap,
            "topic": self.topic,
            "group-id": self.group,
            **self.config,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        process = subprocess.Popen(
            [*command, *words, "--verbose"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **QUICK_JVM},
        )
        ending = threading.Thread(target=self._end, args=(process,), daemon=True)
        ending.start()
        assert process.stdout is not None
        with process.stdout:
            self._follow(process.stdout)
        self._stopping.set()
        ending.join()
        process.wait(JVM_S)

    def _end(self, process: "subprocess.Popen[str]") -> None:
        self._stopping.wait()
        try:
            os.killpg(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            return

    def _follow(self, lines: IO[str]) -> None:
        for line in lines:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            named = {each["partition"] for each in event.get("partitions", ())}
            match event["name"]:
                case "partitions_assigned":
                    self.held = self.held | named
                case "partitions_revoked":
                    self.held = self.held - named
                case "record_data":
                    self.seen.append((event["partition"], event["offset"]))


class JavaConsumer(Java):
    """The same with the consumer protocol."""

    def __init__(self, bootstrap: str, group: str, topic: str, **config: object) -> None:
        super().__init__(bootstrap, group, topic, **{"group-protocol": "CONSUMER", **config})
