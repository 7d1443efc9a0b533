"""Plain-text scenarios of groups, step by step: what is asked, what happens, what everyone is told.

A script in `scripts/` is a list of steps. A step is a line of words: a verb, who does it, and key=value pairs; what
it brings about is written under it, indented by two: every reply given, in order, then the group's state if it
changed. Run with HEADRACE_REWRITE_SCRIPTS=1 to write down what happens now; read the difference before it is
committed.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ErrorCode
from headrace.coordinators.consumer_records import decode_assignment, encode_assignment
from headrace.coordinators.mixed_group import MixedGroup
from tests.coordinators.stage import Stage, subscription

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))
NUMBERS = {
    "epoch",
    "partitions",
    "session",
    "rebalance",
    "version",
    "generation",
    "retention",
    "partition",
    "offset",
}


class Script:
    """One script being played."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.members: dict[str, str] = {}
        self.state = "-"

    def play(self, line: str) -> list[str]:
        verb, *words = line.split()
        who = words.pop(0) if words and "=" not in words[0] else ""
        given: dict[str, Any] = dict(word.split("=", 1) for word in words)
        for name in NUMBERS & given.keys():
            given[name] = int(given[name])
        if "subscribes" in given:
            given["metadata"] = subscription(*given.pop("subscribes").split(","))
        lines = getattr(self, f"do_{verb}")(who, given) or []
        lines += [self.told(name, body) for name, body in self.stage.replies]
        self.stage.replies.clear()
        return lines + self.changed()

    def told(self, who: str, body: Any) -> str:
        error = ErrorCode(body["error_code"])
        member = body.get("member_id")
        if member and "instance" not in who:
            self.members[who] = member
        if error is not ErrorCode.NONE:
            return f"{who}: {error.name}" + (f" id={member}" if error is ErrorCode.MEMBER_ID_REQUIRED else "")
        if "member_epoch" in body:
            has = body.get("assignment")
            listed = "" if has is None else " has " + (_listed(has["topic_partitions"]) or "nothing")
            return f"{who}: epoch={body['member_epoch']}{listed}"
        if "assignment" in body and body["assignment"].startswith(b"\0"):
            topics = decode_assignment(body["assignment"]) or {}
            held = [
                {"topic_id": name.encode(), "partitions": sorted(found)} for name, found in topics.items()
            ]
            return f"{who}: assigned {_listed(held) or 'nothing'}"
        if "assignment" in body:
            return f"{who}: assigned {body['assignment'].decode() or 'nothing'}"
        listed = ",".join(sorted(each["member_id"] for each in body["members"]))
        skip = " skip-assignment" if body["skip_assignment"] else ""
        return (
            f"{who}: joined id={member} generation={body['generation_id']} "
            f"protocol={body['protocol_name']} leader={body['leader']} members={listed or '-'}{skip}"
        )

    def changed(self) -> list[str]:
        group = self.stage.shard.groups.get("g")
        if isinstance(group, MixedGroup):
            state = f"{group.state.value} epoch={group.epoch} target={group.target_epoch}"
        else:
            state = "-" if group is None else f"{group.state.value} generation={group.generation}"
        if state == self.state:
            return []
        self.state = state
        return [f"group: {state}"]

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def do_configure(self, who: str, given: dict[str, Any]) -> None:
        self.stage.configure(**{name.replace("-", "."): value for name, value in given.items()})

    def do_join(self, who: str, given: dict[str, Any]) -> None:
        given["member"] = self._id(given.get("id", who if given.get("id") != "new" else ""), given)
        given.pop("id", None)
        self.stage.join(who, **given)

    def _id(self, name: str, given: dict[str, Any]) -> str:
        return "" if name in ("new", "") else self.members.get(name, name if "id" in given else "")

    def do_topic(self, who: str, given: dict[str, Any]) -> None:
        self.stage.topic(who, given["partitions"], given.get("racks", ""))

    def do_no_topic(self, who: str, given: dict[str, Any]) -> None:
        self.stage.delete_topic(who)

    def do_beat(self, who: str, given: dict[str, Any]) -> None:
        """A heartbeat of the consumer protocol; who does not say otherwise uses its own name as its member id."""
        if "topics" in given:
            given["topics"] = tuple(name for name in given["topics"].split(",") if name)
        if "owns" in given:
            owned = [part.split(":") for part in given["owns"].split("/") if part]
            given["owns"] = {name: [int(each) for each in indexes.split(",")] for name, indexes in owned}
        self.stage.beat(who, given.pop("id", who), given.pop("epoch"), **given)

    def do_sync(self, who: str, given: dict[str, Any]) -> None:
        gives = {
            self.members.get(part.split(":")[0], part.split(":")[0]): _given(part.split(":")[1])
            for part in given.pop("gives", "").split(",")
            if part
        }
        member = self._id(given.pop("id", who), {"id": 1})
        self.stage.sync(who, member, given.pop("generation"), gives, **given)

    def do_heartbeat(self, who: str, given: dict[str, Any]) -> list[str]:
        member = self._id(given.get("id", who), {"id": 1})
        error = self.stage.heartbeat(member, given["generation"], instance=given.get("instance"))
        return [f"{who}: {error.name}"]

    def do_watch(self, who: str, given: dict[str, Any]) -> list[str]:
        waits_ms = self.stage.watch(who, self._id(who, {"id": 1}))
        return [f"{who}: waits {waits_ms} ms" if waits_ms else f"{who}: does not wait"]

    def do_await(self, who: str, given: dict[str, Any]) -> list[str]:
        """The heartbeat of a member of the consumer protocol that brought nothing is left unanswered."""
        waits_ms = self.stage.watch_consumer(who, who)
        return [f"{who}: waits {waits_ms} ms" if waits_ms else f"{who}: does not wait"]

    def do_unawait(self, who: str, given: dict[str, Any]) -> None:
        self.stage.shard.unwatch_consumer("g", who)

    def do_leave(self, who: str, given: dict[str, Any]) -> list[str]:
        member = "" if given.get("id") == "none" else self._id(given.get("id", who), {"id": 1})
        return [f"{who}: {error.name}" for error in self.stage.leave((member, given.get("instance")))]

    def do_commit(self, who: str, given: dict[str, Any]) -> list[str]:
        if who:
            given["member"] = self._id(given.pop("id", who), {"id": 1})
        told = self.stage.commit(given.pop("offset"), **given)
        return [f"{who or 'simple'}: {results[0][2].name}" for results in told] or ["not answered yet"]

    def do_committed(self, who: str, given: dict[str, Any]) -> list[str]:
        return [f"offset {self.stage.committed(**given)}"]

    def do_delete(self, who: str, given: dict[str, Any]) -> list[str]:
        return [error.name for error in self.stage.delete()]

    def do_wait(self, who: str, given: dict[str, Any]) -> None:
        self.stage.advance(int(who))

    def do_restart(self, who: str, given: dict[str, Any]) -> None:
        self.stage.restart()

    def do_unload(self, who: str, given: dict[str, Any]) -> None:
        self.stage.run(lambda now_ms, out: self.stage.shard.unload(ErrorCode.NOT_COORDINATOR, now_ms, out))

    def do_hold(self, who: str, given: dict[str, Any]) -> None:
        self.stage.holds_back = True

    def do_release(self, who: str, given: dict[str, Any]) -> None:
        self.stage.release()

    def do_fail(self, who: str, given: dict[str, Any]) -> None:
        self.stage.fails = None if who == "no" else ErrorCode[who]


def _given(text: str) -> bytes:
    """What a leader gives a member: any text, or partitions in the form that consumers have for them (t@0.1)."""
    topic, _, indexes = text.partition("@")
    if not indexes:
        return text.encode()
    return encode_assignment(0, {topic: frozenset(int(each) for each in indexes.split("."))})


def _listed(topics: list[dict[str, Any]]) -> str:
    return "/".join(
        sorted(
            bytes(each["topic_id"]).rstrip(b"\0").decode() + ":" + ",".join(map(str, each["partitions"]))
            for each in topics
        )
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_goes_as_it_is_written(path: Path) -> None:
    script = Script()
    played: list[str] = []
    written = path.read_text().splitlines()
    for line in written:
        if line.startswith("  "):
            continue
        played.append(line)
        if line and not line.startswith("#"):
            played += [f"  {each}" for each in script.play(line)]
    if os.environ.get("HEADRACE_REWRITE_SCRIPTS"):
        path.write_text("\n".join(played) + "\n")
    assert played == written


def test_there_are_scripts_to_play() -> None:
    assert len(SCRIPTS) >= 8
