"""Pages that are derived from the code say what the code says, and links between pages lead somewhere."""

import re
from pathlib import Path

import pytest

from scripts.write_docs import PARTS, ROOT, pages, with_parts

LINKED = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page to files that are not there."""
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text) + re.findall(
        r'src="(?!https?://)([^"]+)"', text
    )
    return [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("path", sorted({"docs/configuration.md", *PARTS}))
def test_a_derived_page_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text() == pages()[path], "run `make docs`"


def test_a_page_that_lost_its_generated_part_is_refused() -> None:
    with pytest.raises(ValueError, match="generated: apis"):
        with_parts("docs/compatibility.md", "# nothing here\n")


def test_a_stale_generated_part_is_written_anew() -> None:
    path = "docs/compatibility.md"
    text = (ROOT / path).read_text()
    stale = re.sub(r"(<!-- generated: apis -->\n).*?(<!-- end -->)", r"\1old\n\2", text, flags=re.S)
    assert stale != text
    assert with_parts(path, stale) == text


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/nowhere.md) [b](#here) [c](https://example.invalid/x) [d](README.md)"
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md"]
