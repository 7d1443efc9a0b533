"""A member of a classic group: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

Owns the member id and generation, the heartbeat and the joining. Heartbeats run beside the consumer; joining is begun
by `attend` after partitions that must be given up were, runs beside it too, and is completed by a later `attend`.
Invariants: a partition is read only between the generation that gave it and the revocation (eager: before each join;
cooperative: when the new assignment lacks it); after UNKNOWN_MEMBER_ID or ILLEGAL_GENERATION everything owned is lost
before anything else happens; a consumer that does not poll leaves the group. Called by `group`.
"""

import asyncio
from typing import NamedTuple

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.assignors import COOPERATIVE, PROTOCOLS, assign
from headrace.client.commits import MemberIdentity, fetch_committed
from headrace.client.config import ConsumerConfig
from headrace.client.coordinator import Coordinator
from headrace.client.errors import Fenced, error_code
from headrace.client.group_protocol import (
    NO_GENERATION,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_sticky_data,
    encode_subscription,
)
from headrace.client.membership import Hooks, PollClock, refresh_if_stale
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

PROTOCOL_TYPE = "consumer"
JOIN_SLACK_MS = 5_000
LEAVE_TIMEOUT_MS = 5_000

_START_OVER = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})

_log = get_logger(__name__)


class Joined(NamedTuple):
    """What a completed join gave."""

    assigned: frozenset[TopicPartition]
    committed: dict[TopicPartition, OffsetAndMetadata]


class ClassicMember:
    """One membership in one classic group."""

    def __init__(self, config: ConsumerConfig, coordinator: Coordinator, hooks: Hooks) -> None:
        self._config = config
        self._coordinator = coordinator
        self._hooks = hooks
        self._strategies = config.partition_assignment_strategy
        self._cooperative = all(PROTOCOLS[name] == COOPERATIVE for name in self._strategies)
        self._member_id = ""
        self._generation = NO_GENERATION
        self._rejoin = True
        self._lost = False
        self._failure: KafkaError | None = None
        self._join: asyncio.Task[Joined] | None = None
        self._counts: dict[str, int] = {}  # the partitions this leader assigned, by topic
        self._waits_for = ""
        self._clock = PollClock(config)
        self._heartbeats = asyncio.create_task(self._beat(), name="headrace consumer heartbeat")

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(self._generation, self._member_id, self._config.group_instance_id)

    @property
    def waits_for(self) -> str:
        return self._waits_for

    def resubscribe(self) -> None:
        self._rejoin = True
        self._hooks.notify()

    # -- in the consumer's own time ---------------------------------------------------------------------------------

    async def attend(self) -> None:
        self._clock.polled()
        if self._failure is not None:
            raise self._failure
        if self._lost:
            self._lost = False
            await self._hooks.revoke(self._hooks.owned, lost=True)
        if self._join is not None and self._join.done():
            await self._complete()
        if self._rejoin and self._join is None:
            await self._prepare()
            self._rejoin = False
            self._join = asyncio.create_task(self._join_group(), name="headrace consumer join")
            self._join.add_done_callback(self._notify)

    def _notify(self, task: "asyncio.Task[Joined]") -> None:
        if not task.cancelled():
            task.exception()  # attend raises it
        self._hooks.notify()

    async def _prepare(self) -> None:
        """Give up what must not be read while the group decides anew."""
        owned = self._hooks.owned
        topics = set(self._hooks.topics())
        going = frozenset(p for p in owned if p.topic not in topics) if self._cooperative else owned
        if going:
            await self._hooks.revoke(going, lost=False)

    async def _complete(self) -> None:
        assert self._join is not None
        join, self._join = self._join, None
        try:
            joined = join.result()
        except KafkaError as error:
            if not error.retriable:
                self._failure = error
            self._rejoin = True
            raise
        owned = self._hooks.owned
        gone = owned - joined.assigned
        if gone:
            # They are someone else's from the next generation on, which this member must not hold up.
            self._rejoin = True
            await self._hooks.revoke(gone, lost=False)
        self._waits_for = ""
        await self._hooks.adopt(joined.assigned, joined.committed)

    # -- joining ----------------------------------------------------------------------------------------------------

    async def _join_group(self) -> Joined:
        failures = 0
        while True:
            try:
                assigned = await self._join_once()
                fresh = assigned - self._hooks.owned
                committed = {}
                if fresh:
                    self._waits_for = f"committed offsets from {self._coordinator}"
                    committed = await fetch_committed(
                        self._coordinator, fresh, self._config.default_api_timeout_ms
                    )
                return Joined(assigned, committed)
            except KafkaError as error:
                self._coordinator.note(error.code)
                if error.code in _START_OVER:
                    self._start_over(error.code)
                elif error.code is ErrorCode.FENCED_INSTANCE_ID:
                    raise _fenced(self._config) from error
                elif error.code is not ErrorCode.REBALANCE_IN_PROGRESS and not error.retriable:
                    raise
                failures += 1
                self._waits_for = f"{self._coordinator} to let this member join: {error.message}"
            await asyncio.sleep(self._coordinator.cluster.backoff.wait_ms(min(failures, 5)) / 1000)

    def _start_over(self, code: ErrorCode) -> None:
        if code is ErrorCode.UNKNOWN_MEMBER_ID:
            self._member_id = ""
        self._generation = NO_GENERATION

    async def _join_once(self) -> frozenset[TopicPartition]:
        config = self._config
        topics = self._hooks.topics()
        self._waits_for = f"the other members of group {config.group_id!r} to join"
        body = {
            "group_id": config.group_id,
            "session_timeout_ms": config.session_timeout_ms,
            "rebalance_timeout_ms": config.max_poll_interval_ms,
            "member_id": self._member_id,
            "group_instance_id": config.group_instance_id,
            "protocol_type": PROTOCOL_TYPE,
            "protocols": [
                {"name": name, "metadata": self._metadata(name, topics)} for name in self._strategies
            ],
        }
        timeout_ms = max(config.request_timeout_ms, config.max_poll_interval_ms + JOIN_SLACK_MS)
        reply = await self._coordinator.request(Api.JOIN_GROUP, body, timeout_ms=timeout_ms, purpose="join")
        code = error_code(reply.error_code)
        if code is ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = body["member_id"] = reply.member_id
            reply = await self._coordinator.request(
                Api.JOIN_GROUP, body, timeout_ms=timeout_ms, purpose="join"
            )
            code = error_code(reply.error_code)
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"cannot join group {config.group_id!r}: {code.name}")
        self._member_id, generation = reply.member_id, reply.generation_id
        assignments = await self._assign(reply) if reply.leader == reply.member_id else []
        self._waits_for = f"the leader of group {config.group_id!r} to assign partitions"
        sync = await self._coordinator.request(
            Api.SYNC_GROUP,
            {
                "group_id": config.group_id,
                "generation_id": generation,
                "member_id": self._member_id,
                "group_instance_id": config.group_instance_id,
                "protocol_type": PROTOCOL_TYPE,
                "protocol_name": reply.protocol_name,
                "assignments": assignments,
            },
            timeout_ms=timeout_ms,
            purpose="join",
        )
        code = error_code(sync.error_code)
        if code is not ErrorCode.NONE:
            raise KafkaError(code, f"cannot sync with group {config.group_id!r}: {code.name}")
        self._generation = generation
        return decode_assignment(bytes(sync.assignment))

    def _metadata(self, strategy: str, topics: tuple[str, ...]) -> bytes:
        owned = self._hooks.owned
        return encode_subscription(
            Subscription(
                topics,
                owned,
                self._generation,
                self._config.client_rack or None,
                encode_sticky_data(owned, self._generation) if strategy == "sticky" else None,
            )
        )

    async def _assign(self, reply: Message) -> list[dict[str, object]]:
        """The leader's work: an assignment for every member."""
        members = {m.member_id: decode_subscription(bytes(m.metadata)) for m in reply.members}
        cluster = self._coordinator.cluster
        topics = {topic for subscription in members.values() for topic in subscription.topics}
        for topic in topics:
            cluster.track(topic)
        await cluster.refresh()
        self._counts = {t: len(cluster.topics[t].partitions) for t in topics if t in cluster.topics}
        if reply.skip_assignment:  # a static leader that came back: all keep what they have
            return []
        instances = {m.member_id: m.group_instance_id for m in reply.members}
        assignment = assign(reply.protocol_name, members, self._counts, instances)
        return [
            {"member_id": member, "assignment": encode_assignment(partitions)}
            for member, partitions in assignment.items()
        ]

    # -- heartbeats -------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_ms / 1000)
            if self._clock.overdue:
                await self._leave_overdue()
                continue
            await refresh_if_stale(self._coordinator, self._hooks.topics())
            if self._generation != NO_GENERATION and self._join is None:
                self._check_counts()
                await self._heartbeat()

    async def _heartbeat(self) -> None:
        generation = self._generation
        try:
            reply = await self._coordinator.request(
                Api.HEARTBEAT,
                {
                    "group_id": self._config.group_id,
                    "generation_id": generation,
                    "member_id": self._member_id,
                    "group_instance_id": self._config.group_instance_id,
                },
            )
        except KafkaError as error:
            self._waits_for = f"{self._coordinator}: {error.message}"
            return
        code = error_code(reply.error_code)
        self._coordinator.note(code)
        if generation != self._generation or self._join is not None:
            return  # about a generation that is over
        self._waits_for = ""
        if code is ErrorCode.REBALANCE_IN_PROGRESS:
            self.resubscribe()
        elif code in _START_OVER:
            _log.info("removed from the group", extra={"fields": {"group": self._config.group_id}})
            self._start_over(code)
            self._lost = True
            self.resubscribe()
        elif code is ErrorCode.FENCED_INSTANCE_ID:
            self._failure = _fenced(self._config)
            self._hooks.notify()

    def _check_counts(self) -> None:
        """The leader answers for the number of partitions: when it changes, the group assigns anew."""
        topics = self._coordinator.cluster.topics
        now = {t: len(topics[t].partitions) if t in topics else 0 for t in self._counts}
        if now != self._counts:
            self._counts = now
            self.resubscribe()

    async def _leave_overdue(self) -> None:
        if self._generation == NO_GENERATION:
            return
        limit_ms = self._config.max_poll_interval_ms
        _log.warning(
            f"no poll for max.poll.interval.ms={limit_ms}: leaving the group, so that others can go on",
            extra={"fields": {"group": self._config.group_id}},
        )
        await self._leave("poll interval exceeded")
        self._generation, self._member_id = NO_GENERATION, ""
        self._lost = self._rejoin = True

    async def close(self) -> None:
        tasks = [task for task in (self._heartbeats, self._join) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._config.group_instance_id is None:
            await self._leave("the consumer is closed")

    async def _leave(self, reason: str) -> None:
        if not self._member_id:
            return
        member = {"member_id": self._member_id, "reason": reason}
        body = {"group_id": self._config.group_id, "member_id": self._member_id, "members": [member]}
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_MS / 1000):
                await self._coordinator.request(Api.LEAVE_GROUP, body)
        except (KafkaError, TimeoutError) as error:
            _log.info(
                "cannot say goodbye to the group; its session will end by itself",
                extra={"fields": {"group": self._config.group_id, "reason": str(error)}},
            )


def _fenced(config: ConsumerConfig) -> Fenced:
    return Fenced(
        f"another member took over group.instance.id={config.group_instance_id} of group {config.group_id!r}",
        "give every running member an id of its own",
        ErrorCode.FENCED_INSTANCE_ID,
    )
