"""A Spark standalone cluster and a Connect server in processes of their own, from the PySpark package alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyspark

from headrace.testing.ports import free_ports
from tests.testing.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
START_S = 120.0
HOST = "127.0.0.1"


def environment(**more: str) -> dict[str, str]:
    """What every process gets: the same Python at the same path, which is how the environment is shipped here."""
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_NO_DAEMONIZE": "1",
        **more,
    }


@contextmanager
def running(command: Sequence[str], log: Path, ready: str, host: str = HOST) -> Iterator[int]:
    """A process until the block ends, from when its log says that it is ready; its id."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=environment(SPARK_LOCAL_IP=host),
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=log.parent,
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return ready in log.read_text()

        wait_until(is_ready, f"{command[1:3]} ready", START_S)
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def standalone(folder: Path, workers: int = 2) -> Iterator[str]:
    """A master and its workers; the master's address."""
    (port,) = free_ports(1, HOST)
    spark_class = str(SPARK_HOME / "bin" / "spark-class")
    address = f"spark://{HOST}:{port}"
    with ExitStack() as stack:
        name = "org.apache.spark.deploy.master.Master"
        command = [spark_class, name, "--host", HOST, "--port", str(port), "--webui-port", "0"]
        stack.enter_context(running(command, folder / "master.log", "I have been elected leader"))
        for number in range(workers):
            name = "org.apache.spark.deploy.worker.Worker"
            host = f"127.0.0.{number + 1}"  # a task is speculated only on another host
            command = [
                spark_class,
                name,
                "--host",
                host,
                "--webui-port",
                "0",
                "--cores",
                "1",
                "--memory",
                "1g",
            ]
            command += ["--work-dir", str(folder / f"worker-{number}"), address]
            log = folder / f"worker-{number}.log"
            stack.enter_context(running(command, log, "Successfully registered with master", host))
        yield address


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Spark Connect server; its address."""
    (port,) = free_ports(1, HOST)
    name = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--class", name, "--master", "local[2]"]
    for setting in (f"spark.connect.grpc.binding.port={port}", "spark.ui.enabled=false"):
        command += ["--conf", setting]
    with running([*command, "spark-internal"], folder / "connect.log", "Spark Connect server started"):
        yield f"sc://{HOST}:{port}"
