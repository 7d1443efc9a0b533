"""The programs in the documentation run as they are written, apart from the address of the broker."""

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import Broker

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = "127.0.0.1:9092"
PAGES = ("README.md", "docs/client.md", "docs/migrating-clients.md")
RUN_S_MAX = 60


def programs(page: str) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker(settings={"group.initial.rebalance.delay.ms": 0}) as broker:
        for topic in ("orders", "bills", "tables"):
            broker.create_topic(topic)
        yield broker.bootstrap


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run_one_after_the_other(page: str, bootstrap: str) -> None:
    found = programs(page)
    assert found
    names: dict[str, Any] = {}

    async def run(program: str) -> None:
        code = compile(program, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(RUN_S_MAX):
            waits = eval(code, names)
            if waits is not None:
                await waits

    for program in found:
        asyncio.run(run(program.replace(WRITTEN, bootstrap)))


def test_every_page_names_the_address_that_is_replaced() -> None:
    assert all(WRITTEN in (ROOT / page).read_text() for page in PAGES)
