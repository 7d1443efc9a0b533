"""Commands in these tests find the session's broker by the environment, as a person's shell would have it."""

import os
from collections.abc import Callable, Mapping
from itertools import count

import pytest

from headrace.testing import Broker
from tests.cli.command import succeeds

_numbers = count(1)


@pytest.fixture
def env(headrace_session: Broker) -> Mapping[str, str]:
    """An environment that names the broker."""
    return {"HEADRACE_BOOTSTRAP": headrace_session.bootstrap}


@pytest.fixture
def new_topic(env: Mapping[str, str]) -> Callable[..., str]:
    """Creates a topic with a fresh name, by the command."""

    def create(*options: str) -> str:
        name = f"cli-{os.getpid()}-{next(_numbers)}"
        assert succeeds("topic", "create", name, *options, env=env) == f"created topic {name}\n".encode()
        return name

    return create
