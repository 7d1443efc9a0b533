"""A member of a group whose partitions the broker assigns (group.protocol=consumer, KIP-848).

Owns the member epoch, the heartbeats and the way from the assignment that the broker wants to the one that is read.
Heartbeats run beside the consumer; `attend` gives up and takes partitions, and the next heartbeat says so. Invariants:
what a heartbeat claims to own is read or was just adopted, and what was revoked is claimed no longer; after being
fenced, everything owned is lost before the member joins again. Called by `group`.
"""

import asyncio
import base64
import os
from typing import Any

from headrace.base.errors import ErrorCode, KafkaError
from headrace.base.log import get_logger
from headrace.client.commits import MemberIdentity, fetch_committed
from headrace.client.config import ConsumerConfig
from headrace.client.coordinator import Coordinator
from headrace.client.errors import Fenced, error_code
from headrace.client.group_protocol import by_topic
from headrace.client.membership import Hooks, PollClock, refresh_if_stale
from headrace.client.topics import OffsetAndMetadata, TopicPartition
from headrace.wire.apis import Api
from headrace.wire.messages import Message

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
LEAVE_FOR_NOW_EPOCH = -2
FIRST_INTERVAL_MS = 1_000
LEAVE_TIMEOUT_MS = 5_000

_FENCED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})

_log = get_logger(__name__)


class BrokerAssignedMember:
    """One membership in one group of the newer protocol."""

    def __init__(self, config: ConsumerConfig, coordinator: Coordinator, hooks: Hooks) -> None:
        self._config = config
        self._coordinator = coordinator
        self._hooks = hooks
        self._member_id = base64.urlsafe_b64encode(os.urandom(16)).rstrip(b"=").decode()
        self._epoch = JOIN_EPOCH
        self._interval_ms = FIRST_INTERVAL_MS
        self._told: dict[str, Any] = {}  # what the broker knows of this member
        self._wanted: frozenset[tuple[bytes, int]] | None = None  # topic id and partition, as the broker says
        self._target: frozenset[TopicPartition] | None = None  # the same by name, ready to be adopted
        self._committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self._lost = False
        self._left = False
        self._failure: KafkaError | None = None
        self._waits_for = f"{coordinator}"
        self._soon = asyncio.Event()
        self._clock = PollClock(config)
        self._heartbeats = asyncio.create_task(self._beat(), name="headrace consumer heartbeat")

    @property
    def identity(self) -> MemberIdentity:
        return MemberIdentity(self._epoch, self._member_id, self._config.group_instance_id)

    @property
    def waits_for(self) -> str:
        return self._waits_for

    def resubscribe(self) -> None:
        self._soon.set()

    # -- in the consumer's own time ---------------------------------------------------------------------------------

    async def attend(self) -> None:
        self._clock.polled()
        if self._failure is not None:
            raise self._failure
        if self._lost:
            await self._hooks.revoke(self._hooks.owned, lost=True)
            self._lost = self._left = False
            self._soon.set()
        target, committed = self._target, self._committed
        if target is None:
            return
        self._target, self._committed = None, {}
        gone = self._hooks.owned - target
        if gone:
            await self._hooks.revoke(gone, lost=False)
        await self._hooks.adopt(target, committed)
        self._waits_for = ""
        self._soon.set()

    # -- heartbeats -------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        failures = 0
        while True:
            self._soon.clear()
            if self._clock.overdue:
                await self._leave_overdue()
            await refresh_if_stale(self._coordinator, self._hooks.topics())
            try:
                if not self._lost and not self._left and self._hooks.topics():
                    await self._heartbeat()
                    await self._resolve()
                failures = 0
            except KafkaError as error:
                self._coordinator.note(error.code)
                failures += 1
                self._told = {}
                self._waits_for = f"{self._coordinator}: {error.message}"
                if not error.retriable:
                    self._failure = error
                    self._hooks.notify()
                    return
            wait_ms = (
                self._coordinator.cluster.backoff.wait_ms(min(failures, 8)) if failures else self._interval_ms
            )
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._soon.wait()
            except TimeoutError:
                pass

    async def _heartbeat(self) -> None:
        now = self._state()
        changed = {name: value for name, value in now.items() if self._told.get(name, ...) != value}
        reply = await self._coordinator.request(
            Api.CONSUMER_GROUP_HEARTBEAT,
            {
                "group_id": self._config.group_id,
                "member_id": self._member_id,
                "member_epoch": self._epoch,
                "instance_id": self._config.group_instance_id,
                "topic_partitions": None,
                **(now if self._epoch == JOIN_EPOCH else changed),
            },
        )
        code = error_code(reply.error_code)
        self._coordinator.note(code)
        if code in _FENCED:
            _log.info("removed from the group", extra={"fields": {"group": self._config.group_id}})
            self._fence()
        elif code is ErrorCode.UNRELEASED_INSTANCE_ID:
            raise Fenced(
                f"group.instance.id={self._config.group_instance_id} of group {self._config.group_id!r} is in use",
                "give every running member an id of its own",
                code,
            )
        elif code is not ErrorCode.NONE:
            message = reply.error_message or code.name
            raise KafkaError(code, f"group {self._config.group_id!r}: {message}")
        else:
            self._learn(reply, now)

    def _state(self) -> dict[str, Any]:
        owned = by_topic(self._hooks.owned)
        return {
            "rack_id": self._config.client_rack or None,
            "rebalance_timeout_ms": self._config.max_poll_interval_ms,
            "subscribed_topic_names": sorted(self._hooks.topics()),
            "server_assignor": self._config.group_remote_assignor,
            "topic_partitions": [
                {"topic_id": self._coordinator.cluster.topic_id(topic), "partitions": numbers}
                for topic, numbers in owned.items()
            ],
        }

    def _learn(self, reply: Message, told: dict[str, Any]) -> None:
        self._told = told
        self._member_id = reply.member_id or self._member_id
        self._epoch = reply.member_epoch
        self._interval_ms = max(1, reply.heartbeat_interval_ms)
        if reply.assignment is not None:
            self._wanted = frozenset(
                (bytes(topic.topic_id), number)
                for topic in reply.assignment.topic_partitions
                for number in topic.partitions
            )
        elif self._wanted is None and not self._hooks.owned:
            self._waits_for = f"group {self._config.group_id!r} to assign partitions"

    async def _resolve(self) -> None:
        """Turn topic ids into names and find where the group was; then the consumer may adopt."""
        if self._wanted is None or self._lost:
            return
        cluster = self._coordinator.cluster
        if any(cluster.topic_name(topic_id) is None for topic_id, _ in self._wanted):
            await cluster.refresh()
        target = set()
        for topic_id, number in self._wanted:
            name = cluster.topic_name(topic_id)
            if name is None:
                self._waits_for = "metadata of a topic that the group assigned"
                self._interval_ms = min(self._interval_ms, FIRST_INTERVAL_MS)
                return
            target.add(TopicPartition(name, number))
        fresh = target - self._hooks.owned
        committed = {}
        if fresh:
            committed = await fetch_committed(
                self._coordinator, fresh, self._config.default_api_timeout_ms, identity=self.identity
            )
        if self._lost:
            return
        self._wanted = None
        self._target, self._committed = frozenset(target), committed
        self._hooks.notify()

    def _fence(self) -> None:
        self._epoch = JOIN_EPOCH
        self._told, self._wanted, self._target = {}, None, None
        self._lost = True
        self._hooks.notify()

    # -- leaving ----------------------------------------------------------------------------------------------------

    async def _leave_overdue(self) -> None:
        if self._left:
            return
        limit_ms = self._config.max_poll_interval_ms
        _log.warning(
            f"no poll for max.poll.interval.ms={limit_ms}: leaving the group, so that others can go on",
            extra={"fields": {"group": self._config.group_id}},
        )
        self._left = True
        await self._leave()
        self._fence()

    async def close(self) -> None:
        self._heartbeats.cancel()
        await asyncio.gather(self._heartbeats, return_exceptions=True)
        if not self._left:
            await self._leave()

    async def _leave(self) -> None:
        if self._epoch == JOIN_EPOCH and not self._told:
            return
        static = self._config.group_instance_id is not None
        body = {
            "group_id": self._config.group_id,
            "member_id": self._member_id,
            "member_epoch": LEAVE_FOR_NOW_EPOCH if static else LEAVE_EPOCH,
            "instance_id": self._config.group_instance_id,
            "topic_partitions": None,
        }
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_MS / 1000):
                await self._coordinator.request(Api.CONSUMER_GROUP_HEARTBEAT, body)
        except (KafkaError, TimeoutError) as error:
            _log.info(
                "cannot say goodbye to the group; its session will end by itself",
                extra={"fields": {"group": self._config.group_id, "reason": str(error)}},
            )
