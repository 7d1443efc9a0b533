"""The file of `headrace serve --config`: settings of one node, by their Kafka names.

Owns reading it: TOML (`node.toml`), or Java properties by the ending `.properties`, as Kafka's own server.properties.
Invariant: every value comes out as the text that `--set` would have been given. Called by `serve`.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

from headrace.cli.parser import CommandError

LISTENER_HINT = "expected one address such as PLAINTEXT://0.0.0.0:9092"


def read_node_file(path: str) -> dict[str, str]:
    """The settings in a file; CommandError when it cannot be read or is no such file."""
    if path.endswith(".properties"):
        from headrace.cli.options import read_properties

        return read_properties(path)
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {(error.strerror or '').lower()}\n  check --config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(
            f'{path} is not TOML: {error}\n  a line reads node.id = 1, or listeners = "PLAINTEXT://host:9092"'
        ) from None
    return dict(_flattened("", tables, path))


def _flattened(prefix: str, table: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Tables and dotted keys are the same: `[log]` with `dirs` in it is `log.dirs`."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flattened(f"{name}.", value, path)
        elif isinstance(value, list) and all(isinstance(item, str | int) for item in value):
            yield name, ",".join(map(str, value))
        elif isinstance(value, bool):
            yield name, str(value).lower()
        elif isinstance(value, str | int | float):
            yield name, str(value)
        else:
            raise CommandError(f"{path}: {name} has a value of a kind that no setting has: {value!r}")


def listener_address(text: str) -> tuple[str, int]:
    """Host and port of `listeners`; an empty host is every address."""
    _, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    if "," in text or not port.isdigit() or int(port) > 65_535:
        raise CommandError(f"listeners {text!r}: {LISTENER_HINT}")
    return host.strip("[]") or "0.0.0.0", int(port)
