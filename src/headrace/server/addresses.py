"""Where nodes are reached, as settings tell it: the voters, and what this broker tells clients of itself.

Pure. Invariant: a setting that cannot be read, or contradicts another, stops the process before it does anything, with
words that say what to do. Called by the process.
"""

from collections.abc import Mapping

from headrace.base.settings import BrokerConfig
from headrace.server.peer_link import Address

WILDCARDS = ("", "0.0.0.0", "::")


class CannotServe(Exception):
    """Why the broker cannot start, with what to do about it."""


def voters_of(config: BrokerConfig, host: str, port: int) -> dict[int, Address]:
    """Who votes, and where they are reached; this node alone when nothing is said of others."""
    voters: dict[int, Address] = {}
    for text in config.controller_quorum_voters:
        node_id, at, address = text.partition("@")
        name, colon, number = address.rpartition(":")
        if not at or not colon or not name or not node_id.isdigit() or not number.isdigit():
            raise CannotServe(f"controller.quorum.voters {text!r} should read id@host:port")
        voters[int(node_id)] = (name.strip("[]"), int(number))
    roles = config.process_roles
    if not voters:
        voters = {config.node_id: (host, port)}
    if "controller" not in roles and config.node_id in voters:
        raise CannotServe(
            f"node {config.node_id} is among controller.quorum.voters; "
            "add controller to its process.roles, or take it out of the voters"
        )
    if "broker" not in roles and config.node_id not in voters:
        raise CannotServe(
            f"node {config.node_id} is no broker by its process.roles, and not among controller.quorum.voters"
        )
    return voters


def logged_voters_of(voters: Mapping[int, str]) -> dict[int, Address]:
    """Where the voters are reached by what the metadata log says, as far as it can be read."""
    known: dict[int, Address] = {}
    for node_id, address in voters.items():
        name, _, number = address.rpartition(":")
        if name and number.isdigit():
            known[node_id] = (name.strip("[]"), int(number))
    return known


def advertised_of(config: BrokerConfig, host: str, port: int, hostname: str) -> tuple[str, int]:
    """Where clients are told to connect: `advertised.listeners` if set, else where the broker listens.

    A broker that listens on every address tells its host's name: no client can connect to "every address".
    """
    if not config.advertised_listeners:
        return (hostname if host in WILDCARDS else host), port
    address = config.advertised_listeners[0].rpartition("://")[2]
    name, _, number = address.rpartition(":")
    if not number.isdigit():
        raise CannotServe(
            f"advertised.listeners {config.advertised_listeners[0]!r} should read PLAINTEXT://host:port"
        )
    return name.strip("[]"), int(number)
