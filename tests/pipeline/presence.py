"""Whether tests may start Spark here."""

import os
import shutil
import subprocess


def why_no_spark() -> str | None:
    """What keeps the many tests on Spark from running here, in a word for the person who reads the report."""
    if os.environ.get("HEADRACE_SPARK") != "1":
        return "a Spark session takes its time: make testspark runs these"
    return why_spark_cannot_run()


def why_spark_cannot_run() -> str | None:
    """What is missing for Spark on this machine."""
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "pyspark is not installed: make testspark installs it"
    if shutil.which("java") is None:
        return "no Java found: install a runtime of version 17 (Debian: apt install openjdk-17-jre-headless)"
    found = subprocess.run(["java", "-version"], capture_output=True, check=False)
    return None if found.returncode == 0 else "java does not run here"
