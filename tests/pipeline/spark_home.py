"""Where the tests' Spark is started from."""

from pathlib import Path

import pyspark


def spark_home(folder: Path) -> Path:
    """Spark without its own zip of pyspark.

    Spark puts the zip before the installed package, and each of the ten or so processes of a driver compiles anew what
    it imports from there: a second for each, of the ten that Spark waits for some of them.
    """
    home = folder / "spark"
    if not home.exists():
        home.mkdir()
        for part in ("bin", "jars"):
            (home / part).symlink_to(Path(pyspark.__file__).parent / part)
    return home
