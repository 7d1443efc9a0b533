"""What this machine must have before a pipeline can run: pyspark of a version that is known to work, and Java.

Owns that question and the words of the answer. Invariant: nothing of pyspark is imported, so it answers in no time and
where there is none. Called by the command line.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

SPARK_MIN: Final = (4, 2)
SPARK_BELOW: Final = (5, 0)
JAVA_MIN: Final = 17
JAVA_TIMEOUT_S: Final = 30
INSTALL_JAVA: Final = (
    f"install a runtime of version {JAVA_MIN} or newer "
    f"(Debian, Ubuntu: apt install openjdk-{JAVA_MIN}-jre-headless; "
    f"Fedora: dnf install java-{JAVA_MIN}-openjdk-headless; macOS: brew install openjdk@{JAVA_MIN})"
)


class NotReady(Exception):
    """Something is missing on this machine; the text says what and how to get it."""


def check_spark(master: str) -> None:
    """Can Spark run here? A Connect server (sc://) has its own Java. Raises NotReady."""
    try:
        found = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        raise NotReady("pyspark is not installed: pip install 'headrace[spark]'") from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not SPARK_MIN <= numbers < SPARK_BELOW:
        wanted = f"{SPARK_MIN[0]}.{SPARK_MIN[1]} or newer, below {SPARK_BELOW[0]}"
        raise NotReady(f"pyspark {found} is installed, and {wanted} is needed: pip install 'headrace[spark]'")
    if not master.startswith("sc://"):
        check_java()


def check_java() -> None:
    """Is there a Java that Spark can use? Raises NotReady."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f" in JAVA_HOME ({home})" if home else ""
        raise NotReady(f"no Java found{where}, and Spark needs one: {INSTALL_JAVA}")
    try:
        asked = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotReady(f"{java} does not run ({error}): {INSTALL_JAVA}") from None
    version = re.search(r'version "(?:1\.)?(\d+)', asked.stderr + asked.stdout)
    if asked.returncode != 0 or version is None:
        raise NotReady(f"{java} does not run: {INSTALL_JAVA}")
    if int(version[1]) < JAVA_MIN:
        raise NotReady(f"{java} is version {version[1]}, too old for Spark: {INSTALL_JAVA}")
