"""What is asked before Spark starts: are the brokers there, are the topics, and is the checkpoint of this pipeline.

Owns those questions and the note that a run leaves in its checkpoint. Invariant: nothing is changed but that note; what
is wrong is said in seconds, before a JVM is started and before data moves. Called by `runner`.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headrace.base.errors import KafkaError
from headrace.client.admin import Admin
from headrace.client.cluster import TopicInfo
from headrace.pipeline.job import Job
from headrace.pipeline.nodes import hint

NOTE: Final = "headrace.json"
NOTE_VERSION: Final = 1
LOSS_ALLOWED: Final = ("skip", "report")
ASK_TIMEOUT_MS: Final = 15_000


class PreflightError(Exception):
    """The run cannot begin; the text says why and what to do."""


@dataclass(frozen=True)
class Query:
    """What a checkpoint is about: which sink of which sources."""

    sink: str
    sources: tuple[str, ...]


def queries_of(job: Job) -> dict[str, Query]:
    """The queries of a run by the name of their checkpoint."""
    topics = tuple(source.topic or f"~{source.pattern}" for source in job.sources if source.subscription)
    found = {f"{n}-{sink.source}": Query(sink.label, topics) for n, sink in enumerate(job.sinks)}
    if job.dead_letters is not None:
        found["dead"] = Query(f"topic {job.dead_letters}", topics)
    return found


async def check_brokers(job: Job) -> dict[str, TopicInfo]:
    """The topics that a file names, all of them there. Raises PreflightError."""
    timeouts = dict.fromkeys(("request.timeout.ms", "default.api.timeout.ms"), ASK_TIMEOUT_MS)
    try:
        async with Admin({**timeouts, "bootstrap.servers": job.bootstrap, **job.kafka}) as admin:
            there = {topic.name: topic for topic in await admin.list_topics()}
    except KafkaError as error:
        raise PreflightError(f"cannot reach the brokers at {job.bootstrap}: {error.message}") from None
    wanted = [
        (source.line, f"source '{source.name}' reads", name.strip())
        for source in job.sources
        for name in (source.topic or "").split(",")
        if name.strip()
    ]
    wanted += [(sink.line, "a sink writes", sink.to) for sink in job.sinks if sink.kind == "topic"]
    wanted += [(1, "dead letters go to", job.dead_letters)] if job.dead_letters is not None else []
    complaints = [_missing(job, *one, there) for one in wanted if one[2] not in there]
    if complaints:
        raise PreflightError("\n".join(complaints))
    return there


def _missing(job: Job, line: int, what: str, name: str, there: dict[str, Any]) -> str:
    near = hint(name, there, "")
    create = f"create it with: headrace topic create {name}"
    return f"{job.path}:{line}: {what} topic '{name}', which does not exist: {near if 'did you' in near else create}"


def check_checkpoint(job: Job, topics: dict[str, TopicInfo]) -> None:
    """Is the checkpoint of this pipeline, and of these topics? Leaves a note there. Raises PreflightError."""
    folder = Path(job.checkpoint)
    if "://" in job.checkpoint:
        return  # on a store that Spark reaches and this process may not
    wanted = queries_of(job)
    note = folder / NOTE
    if note.exists():
        _compare(folder, _read_note(note), wanted)
    _compare_ids(job, folder, topics)
    if not job.master.startswith("sc://"):
        folder.mkdir(parents=True, exist_ok=True)
        text = {"version": NOTE_VERSION, "queries": {name: asdict(query) for name, query in wanted.items()}}
        note.write_text(json.dumps(text, indent=1))


def _read_note(note: Path) -> dict[str, Query]:
    try:
        read = json.loads(note.read_text())
        if read["version"] != NOTE_VERSION:
            raise PreflightError(f"{note} was written by another version of headrace: use a new checkpoint")
        return {name: Query(q["sink"], tuple(q["sources"])) for name, q in read["queries"].items()}
    except (ValueError, KeyError, TypeError):
        raise PreflightError(f"{note} is damaged: restore it, or use a new checkpoint") from None


def _compare(folder: Path, before: dict[str, Query], wanted: dict[str, Query]) -> None:
    for name, was in before.items():
        now = wanted.get(name)
        if not (folder / name).exists():
            continue  # it never began
        if now is None:
            near = [other for other, query in wanted.items() if query.sink == was.sink]
            moved = f" it is {near[0]} now, and would begin anew and write everything again;" if near else ""
            if near:
                raise PreflightError(
                    f"the checkpoint {folder} knows {was.sink} as {name};{moved} put the sinks back into their order, "
                    "or use a new checkpoint"
                )
            continue
        if now.sink != was.sink:
            raise PreflightError(
                f"the checkpoint {folder}/{name} is of {was.sink}, and the file now says {now.sink}: "
                "use a new checkpoint, or put it back"
            )
        if now.sources != was.sources:
            raise PreflightError(
                f"the checkpoint {folder}/{name} is of {', '.join(was.sources)}, and the file now reads "
                f"{', '.join(now.sources)}: use a new checkpoint, or put it back"
            )


def _compare_ids(job: Job, folder: Path, topics: dict[str, TopicInfo]) -> None:
    """A topic that was created anew is not the one that the checkpoint is about."""
    lenient = {
        source.topic
        for source in job.sources
        for name, value in source.options.items()
        if (name.lower() == "ondataloss" and value in LOSS_ALLOWED)
        or (name.lower() == "failondataloss" and value.lower() == "false")
    }
    for name in queries_of(job):
        for topic, was in checkpointed_ids(folder / name).items():
            now = topics[topic].topic_id.hex() if topic in topics else ""
            if was and now and was != now and topic not in lenient:
                raise PreflightError(
                    f"topic '{topic}' was deleted and created again since the checkpoint {folder}/{name} was written: "
                    "use a new checkpoint, or set onDataLoss: skip in the options of its source"
                )


def checkpointed_ids(folder: Path) -> dict[str, str]:
    """The ids of the topics in the newest offsets of a query's checkpoint."""
    logs = [path for path in (folder / "offsets").glob("*") if path.name.isdigit()]
    if not logs:
        return {}
    found: dict[str, str] = {}
    newest = max(logs, key=lambda path: int(path.name))
    for line in newest.read_text(errors="replace").splitlines():
        try:
            topics = json.loads(line).get("topics", {})
            found |= {name: str(topic["id"]) for name, topic in topics.items()}
        except (ValueError, AttributeError, KeyError, TypeError):
            continue
    return found
