"""The source tree itself is read and held to the rules of `rules.py`."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.rules import RULES, TEST_RULES, TEXT_RULES, Rule, Source

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "src" / "headrace"


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every text file of the repository; outside a checkout, the files that a source distribution holds."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = listing.stdout.split("\0") if listing.returncode == 0 else []
    found = [ROOT / name for name in names if name] or [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("tests/**/*.py"),
    ]
    return tuple(path for path in found if path.is_file() and path.suffix not in {".png", ".bin"})


@cache
def package_sources() -> tuple[Source, ...]:
    paths = sorted(PACKAGE_DIR.rglob("*.py"))
    return tuple(Source(str(path.relative_to(PACKAGE_DIR)), path.read_text()) for path in paths)


@cache
def suite_sources() -> tuple[Source, ...]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths)


def test_the_package_is_found_where_the_rules_look() -> None:
    assert "base/errors.py" in {source.path for source in package_sources()}
    assert "tests/tidy/test_tree.py" in {source.path for source in suite_sources()}
    assert ROOT / "pyproject.toml" in tracked_files() or not (ROOT / ".git").exists()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_of_the_package_keeps_the_rule(rule: Rule) -> None:
    assert [complaint for source in package_sources() for complaint in rule(source)] == []


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_every_module_of_the_tests_keeps_the_rule(rule: Rule) -> None:
    assert [complaint for source in suite_sources() for complaint in rule(source)] == []


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_every_tracked_file_keeps_the_rule(rule) -> None:
    complaints = []
    for path in tracked_files():
        complaints += rule(str(path.relative_to(ROOT)), path.read_text(errors="replace"))
    assert complaints == []
