"""Raft step by step: scripts in plain text, each command with what it shows, replayed against the production code.

A script is blocks of commands, `----`, and what they print. `HEADRACE_REWRITE_SCRIPTS=1` writes what is printed now
into the files, to be read in the diff.
"""

import os
from pathlib import Path

import pytest

from headrace.consensus.raft.refusal import Refused
from headrace.consensus.raft.settings import RaftSettings
from tests.consensus.raft.bench import Bench, Host, describe_entry, describe_message, describe_node

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


class Player:
    """Plays the commands of one script."""

    def __init__(self) -> None:
        self.bench = Bench(1)

    def play(self, command: str) -> list[str]:
        """What a command prints."""
        name, *words = command.split()
        try:
            return list(getattr(self, f"do_{name}")(*words) or ())
        except Refused as refused:
            leader = f", ask {refused.leader}" if refused.leader else ""
            return [f"refused: {refused.code.name}{leader}"]

    def _hosts(self, words: tuple[str, ...]) -> list[Host]:
        return [self.bench.hosts[int(word)] for word in words] if words else list(self.bench.hosts.values())

    def _link(self, words: tuple[str, ...]) -> tuple[int | None, int | None]:
        if not words:
            return None, None
        sender, _, to = words[0].partition("->")
        return (int(sender) if sender else None), (int(to) if to else None)

    def do_cluster(self, *words: str) -> None:
        """`cluster 3 observers=4,5 append_bytes_max=40`."""
        options = dict(word.split("=") for word in words[1:])
        observers = tuple(int(node) for node in options.pop("observers", "").split(",") if node)
        settings = RaftSettings(**{name: int(value) for name, value in options.items()})
        self.bench = Bench(int(words[0]), observers, settings)

    def do_status(self, *words: str) -> list[str]:
        return [describe_node(host) for host in self._hosts(words)]

    def do_log(self, *words: str) -> list[str]:
        lines = []
        for host in self._hosts(words):
            log = host.node.log
            entries = log.entries(log.start, log.end, 1 << 40)
            lines.append(
                f"{host.id} from {log.start}: {' '.join(describe_entry(entry) for entry in entries)}"
            )
        return lines

    def do_applied(self, *words: str) -> list[str]:
        return [f"{host.id}: {b' '.join(host.applied).decode()}" for host in self._hosts(words)]

    def do_told(self, *words: str) -> list[str]:
        lines = []
        for host in self._hosts(words):
            lines += [f"{host.id}: {line}" for line in host.told]
            host.told.clear()
        return lines

    def do_elect(self, node: str) -> None:
        self.bench.elect(int(node))

    def do_campaign(self, node: str) -> None:
        self.bench[int(node)].campaign()
        self.bench.pump(self.bench.hosts[int(node)])

    def do_quiet(self) -> None:
        """Nobody has heard a leader for an election timeout, and nobody has done anything about it yet."""
        for host in self.bench.hosts.values():
            host.node._elapsed = self.bench.settings.election_ticks

    def do_tick(self, node: str, count: str = "1") -> None:
        self.bench.tick(int(node), int(count))

    def do_time(self, count: str) -> None:
        self.bench.tick_all(int(count))

    def do_messages(self) -> list[str]:
        return [describe_message(message) for message in self.bench.messages]

    def do_deliver(self, *words: str) -> list[str]:
        """All messages of a link (`1->2`, `1->`, `->2`), with what comes of them there; without one, everything."""
        return [describe_message(message) for message in self.bench.deliver(*self._link(words))]

    def do_settle(self) -> None:
        self.bench.deliver()

    def do_drop(self, *words: str) -> None:
        sender, to = self._link(words)
        for message in list(self.bench.messages):
            if sender in (None, message.sender) and to in (None, message.to):
                self.bench.messages.remove(message)

    def do_cut(self, *words: str) -> None:
        sender, to = self._link(words)
        assert sender is not None and to is not None
        self.bench.cut.add((sender, to))

    def do_isolate(self, node: str) -> None:
        self.bench.isolate(int(node))

    def do_heal(self) -> None:
        self.bench.cut.clear()

    def do_propose(self, node: str, *entries: str) -> None:
        self.bench.propose(int(node), *[entry.encode() for entry in entries])

    def do_read(self, node: str, token: str) -> None:
        self.bench[int(node)].read(token)
        self.bench.pump(self.bench.hosts[int(node)])

    def do_transfer(self, node: str, to: str) -> None:
        self.bench[int(node)].transfer(int(to))
        self.bench.pump(self.bench.hosts[int(node)])

    def do_add(self, node: str, voter: str) -> None:
        self.bench[int(node)].add_voter(int(voter), f"node-{voter}")
        self.bench.pump(self.bench.hosts[int(node)])

    def do_remove(self, node: str, voter: str) -> None:
        self.bench[int(node)].remove_voter(int(voter))
        self.bench.pump(self.bench.hosts[int(node)])

    def do_snapshot(self, node: str, keep: str = "0") -> None:
        self.bench.hosts[int(node)].snapshot(int(keep))

    def do_hold(self, node: str) -> None:
        """Let the syncs of a node wait."""
        self.bench.hosts[int(node)].holds_syncs = True

    def do_sync(self, node: str) -> list[str]:
        """Let the sync that waits finish."""
        return [] if self.bench.hosts[int(node)].run_sync() else ["nothing to sync"]

    def do_crash(self, node: str) -> None:
        self.bench.hosts[int(node)].crash()

    def do_restart(self, node: str) -> None:
        host = self.bench.hosts[int(node)]
        if host.up:
            host.crash()
        host.holds_syncs = False
        host.start()
        self.bench.pump(host)


def replay(text: str) -> str:
    """The script with what its commands print now."""
    player = Player()
    blocks = []
    for block in text.rstrip("\n").split("\n\n"):
        commands = block.split("\n----")[0].split("\n")
        printed = []
        for command in commands:
            if command and not command.startswith("#"):
                printed += player.play(command)
        if all(command.startswith("#") for command in commands):
            blocks.append("\n".join(commands))
        else:
            blocks.append("\n".join([*commands, "----", *printed]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_plays_as_it_is_written(path: Path) -> None:
    text = path.read_text()
    played = replay(text)
    if os.environ.get("HEADRACE_REWRITE_SCRIPTS"):
        path.write_text(played)
    else:
        assert played == text


def test_a_script_that_expects_something_else_fails() -> None:
    wrong = "cluster 1\nstatus\n----\n1 leader\n"
    assert replay(wrong) != wrong
