"""Writes the pages and the parts of pages that are derived from the code, so that they cannot say anything else.

    python -m scripts.write_docs [--check]

`docs/configuration.md` is the table of settings; in `docs/compatibility.md` the parts between
`<!-- generated: NAME -->` and `<!-- end -->` come from the table of APIs and the lists of foreign suites. With --check
nothing is written, and the exit status is 1 when a page is out of date; a test asks the same.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from headrace.base.settings import BROKER_SETTINGS, TOPIC_SETTINGS, Reload, Setting
from headrace.base.settings_types import INT_MAX, LONG_MAX, Between, EachOf, LevelOrDefault, OneOf
from headrace.wire.apis import SUPPORTED
from tests.compat.suites import SUITES, read_list

ROOT = Path(__file__).resolve().parents[1]
RELOAD_WORDS = {
    Reload.READ_ONLY: "at start",
    Reload.PER_BROKER: "while running, for one broker",
    Reload.CLUSTER_WIDE: "while running",
}
CONFIGURATION_HEAD = """\
# Settings

Names, types, defaults and meanings are Kafka's. A broker's settings are given at its start (`headrace serve --set
key=value`) and, where the last column says so, changed while it runs (`headrace config alter`, or any Kafka admin
client). A topic's settings are given at its creation and changed at any time; a topic that does not set one takes the
broker's setting named in the last column. Settings marked *later* are accepted, kept and shown, and take effect with
the capability they name.

This page is written from the declarations in `src/headrace/base/settings_*.py` by `make docs`.
"""


def bounds(setting: Setting) -> str:
    """What values a setting takes, in a few words."""
    bound = setting.bound
    if isinstance(bound, LevelOrDefault):
        return f"{bound.low} to {bound.high}, or {bound.default}"
    if isinstance(bound, Between):
        return f"{bound.low} and up" if bound.high in (INT_MAX, LONG_MAX) else f"{bound.low} to {bound.high}"
    if isinstance(bound, EachOf):
        return "any of " + ", ".join(bound.words)
    if isinstance(bound, OneOf):
        return ", ".join(bound.words)
    return ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def setting_rows(settings: Iterable[Setting], last: str) -> list[str]:
    rows = [f"| setting | type | default | values | {last} |", "|---|---|---|---|---|"]
    details = []
    for setting in sorted(settings, key=lambda s: s.name):
        default = (
            ""
            if setting.default_text is None
            else f"`{setting.default_text}`"
            if setting.default_text
            else "empty"
        )
        where = (
            ", ".join(f"`{name}`" for name in setting.synonyms)
            if last == "broker's setting"
            else RELOAD_WORDS[setting.reload]
        )
        kind = setting.type.name.lower()
        rows.append(f"| `{setting.name}` | {kind} | {default} | {cell(bounds(setting))} | {where} |")
        later = f" *Later: with {setting.needs}.*" if setting.needs else ""
        details.append(f"- **`{setting.name}`**: {cell(setting.doc)}{later}")
    return [*rows, "", *details]


def configuration_page() -> str:
    lines = [CONFIGURATION_HEAD, "## Topics", ""]
    lines += setting_rows(TOPIC_SETTINGS.values(), "broker's setting")
    lines += ["", "## Brokers", ""]
    lines += setting_rows(BROKER_SETTINGS.values(), "changed")
    return "\n".join(lines) + "\n"


def api_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def apis_part() -> str:
    rows = ["| key | API | versions |", "|---:|---|---|"]
    for api, (first, last) in sorted(SUPPORTED.items()):
        rows.append(
            f"| {int(api)} | {api_name(api.name)} | {first if first == last else f'{first} to {last}'} |"
        )
    return "\n".join(rows)


def suites_part() -> str:
    rows = ["| suite | tests | held to | left out, by what they need |", "|---|---:|---:|---|"]
    for suite in SUITES:
        entries = read_list(suite)
        reasons = Counter(entry.reason.rsplit(": ", 1)[-1] for entry in entries if not entry.run)
        told = "; ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        rows.append(f"| {suite} | {len(entries)} | {sum(entry.run for entry in entries)} | {told} |")
    return "\n".join(rows)


PARTS = {"docs/compatibility.md": {"apis": apis_part, "suites": suites_part}}


def with_parts(path: str, text: str) -> str:
    """The page with its generated parts written anew; a page that lacks one of them is an error."""
    for name, make in PARTS[path].items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            raise ValueError(f"{path} has no part <!-- generated: {name} --> ... <!-- end -->")
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        text = pattern.sub((begin + make() + "\n" + end).replace("\\", r"\\"), text)
    return text


def pages() -> dict[str, str]:
    """Every derived page as it should read now, by its path."""
    made = {"docs/configuration.md": configuration_page()}
    for path in PARTS:
        made[path] = with_parts(path, (ROOT / path).read_text())
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when a page is out of date"
    )
    check = parser.parse_args().check
    stale = 0
    for path, text in pages().items():
        target = ROOT / path
        if target.exists() and target.read_text() == text:
            continue
        stale += 1
        if check:
            print(f"{path} is out of date: run make docs")
        else:
            target.write_text(text)
            print(f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
