"""One broker process, owned by a test.

Owns the child process, its port, its log and (unless one is given) its data directory. Invariants: `start`
returns only when the broker has printed `ready`; the port stays the same over `restart`, so clients find it
again; the process ends with this one. The last comes from a lifeline: the child's standard input is a pipe
that only this process can write to, and the broker stops when it reads end-of-file there, which the kernel
delivers however this process dies. (PR_SET_PDEATHSIG would fire when the *thread* that started the broker
ends, and exists on Linux only.)

Called by `headrace.testing.plugin` and by people's own test code.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Self

from headrace.testing.ports import free_ports

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
PORT_ATTEMPTS_MAX = 20
LOG_TAIL_BYTES = 16_384


class BrokerFailed(Exception):
    """The broker did not start, or did not stop cleanly. The message ends with its log."""


class Broker:
    """A real Headrace broker in its own process.

    >>> with Broker() as broker:                 # in memory, on a free port of 127.0.0.1
    ...     print(broker.bootstrap)

    `settings` are broker settings by their Kafka name. `memory=False` keeps data in `data_dir`, or in a temporary
    directory that is removed by `close`. Leaving the `with` block closes it.
    """

    def __init__(
        self,
        *,
        memory: bool | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, object] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        log_level: str = "INFO",
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        if memory and data_dir is not None:
            raise ValueError("a broker in memory has no data_dir: give one or the other")
        self.memory = data_dir is None if memory is None else memory
        self.settings = {name: _text(value) for name, value in (settings or {}).items()}
        self.host = host
        self.port = port
        self.log_level = log_level
        self.start_timeout_s = start_timeout_s
        self._env = dict(env or {})
        self._fixed_port = port != 0
        self._own_dir: str | None = None
        self.data_dir: str | None = None if data_dir is None else os.fspath(data_dir)
        if not self.memory and self.data_dir is None:
            self._own_dir = self.data_dir = tempfile.mkdtemp(prefix="headrace-test-")
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="headrace-log-")  # noqa: SIM115 (closed by close)
        self._process: subprocess.Popen[bytes] | None = None

    # -- what a test asks -------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """`host:port`, for `bootstrap.servers`."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the running broker."""
        if self._process is None:
            raise BrokerFailed("the broker is not running: call start()")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def log(self, tail_bytes: int | None = None) -> str:
        """What the broker wrote to standard error, over all its starts."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        begin = 0 if tail_bytes is None else max(0, size - tail_bytes)
        return os.pread(self._log.fileno(), size - begin, begin).decode(errors="replace")

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic and wait until it can be written to."""
        from headrace.testing.topics import create_topic

        create_topic(self.bootstrap, name, partitions, replication_factor, config or {})

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> "Broker":
        """Start the process and return when it accepts records."""
        if self.running:
            return self
        restart_port = self.port if self.port else None
        for attempt in range(PORT_ATTEMPTS_MAX):
            if restart_port is None:
                (self.port,) = free_ports(1, self.host)
            try:
                self._launch()
                return self
            except BrokerFailed as error:
                # Another process may take the port between the look and the bind. Then choose again.
                taken = restart_port is None and "in use" in str(error)
                if not taken or attempt == PORT_ATTEMPTS_MAX - 1:
                    if restart_port is None:
                        self.port = 0
                    raise
        raise AssertionError("unreachable")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop cleanly (SIGTERM). Raises BrokerFailed when it does not end, or ends with a status other than 0."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            # A paused process would never see the signal.
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise BrokerFailed(
                    f"the broker did not stop within {timeout_s} s of SIGTERM{self._tail()}"
                ) from None
        self._reap()
        if process.returncode != 0:
            raise BrokerFailed(f"the broker ended with status {process.returncode}{self._tail()}")

    def kill(self) -> None:
        """End it at once (SIGKILL): no clean shutdown, as in a crash. Data of a broker in memory is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reap()

    def restart(self, *, clean: bool = True) -> "Broker":
        """Stop (or, with `clean=False`, kill) and start again on the same port."""
        if clean:
            self.stop()
        else:
            self.kill()
        return self.start()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its own temporary files. A broker that had died by itself raises BrokerFailed."""
        try:
            self.stop()
        finally:
            self.kill()
            self._discard()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The test's own error matters more than how the broker ended.
        with contextlib.suppress(BrokerFailed):
            self.close()

    def __del__(self) -> None:
        # For a broker that was never closed, such as one that could not start.
        process = getattr(self, "_process", None)
        if process is not None:
            process.kill()
            process.wait()
            self._reap()
        if getattr(self, "_log", None) is not None:
            self._discard()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "headrace", "serve", "--host", self.host, "--port", str(self.port)]
        command += ["--log-level", self.log_level]
        if self.memory:
            command.append("--memory")
        else:
            assert self.data_dir is not None
            command += ["--data", self.data_dir]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def _launch(self) -> None:
        start_of_log = os.fstat(self._log.fileno()).st_size
        os.lseek(self._log.fileno(), 0, os.SEEK_END)
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._env, "HEADRACE_STOP_ON_STDIN_EOF": "1"},
            start_new_session=True,  # Ctrl-C in the terminal reaches the tests, which then stop the broker
        )
        try:
            self._await_ready()
        except BaseException as error:
            self.kill()
            if isinstance(error, BrokerFailed):
                log = os.pread(self._log.fileno(), LOG_TAIL_BYTES, start_of_log).decode(errors="replace")
                raise BrokerFailed(f"{error}\n--- broker log ---\n{log}") from None
            raise

    def _await_ready(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        deadline_s = time.monotonic() + self.start_timeout_s
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in output:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not selector.select(remaining_s):
                    raise BrokerFailed(f"the broker was not ready within {self.start_timeout_s} s")
                chunk = os.read(process.stdout.fileno(), 4096)
                if not chunk:
                    raise BrokerFailed(f"the broker ended with status {process.wait()} before it was ready")
                output += chunk
        line = output.split(b"\n", 1)[0].decode(errors="replace")
        word, _, address = line.partition(" ")
        port = address.rpartition(":")[2]
        if word != "ready" or not port.isdigit():
            raise BrokerFailed(f"expected 'ready HOST:PORT' from the broker, got {line!r}")
        self.port = int(port)

    def _discard(self) -> None:
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)
        self._log.close()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _tail(self) -> str:
        return f"\n--- end of the broker log ---\n{self.log(LOG_TAIL_BYTES)}"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
