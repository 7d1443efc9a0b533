"""Running the `headrace` command as people do: in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_S = 90


def headrace_command(
    *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The finished command, with what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=stdin,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )


def succeeds(*arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
    """Standard output of a command that must end with status 0 and nothing on standard error."""
    done = headrace_command(*arguments, stdin=stdin, env=env)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout


def fails(
    status: int,
    *arguments: str,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> str:
    """Standard error of a command that must end with this status."""
    done = headrace_command(*arguments, stdin=stdin, env=env, cwd=cwd)
    assert done.returncode == status, done
    assert done.stderr, "an error must be said on standard error"
    assert b"Traceback" not in done.stderr
    return done.stderr.decode()
