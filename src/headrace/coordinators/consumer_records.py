"""The records of groups of the consumer protocol in `__consumer_offsets`, byte for byte as Kafka writes them.

A key begins with a version that says what the record is: 3 the group's epoch, 4 the topics it subscribes to, 5 a
member, 6 the epoch of the target assignment, 7 a member's target, 8 what a member has, 16 what a regular expression
stands for. Values are of version 0, with compact lengths. Invariant: what is encoded here decodes to the same.
`ConsumerGroup` writes them, the group shard's replay reads them.
"""

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from headrace.base.errors import KafkaError
from headrace.coordinators.record_reader import RecordReader

Assignment: TypeAlias = Mapping[bytes, frozenset[int]]
"""Partitions by topic id. A topic without any is not in it."""
NOTHING: Final[Assignment] = {}
VERSION: Final = 0
CLASSIC_TAG: Final = 0

_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_CURRENT = struct.Struct(">hiib")
_NO_TAGS: Final = b"\0"


class Kind(IntEnum):
    """What a record is about, which is its key's version."""

    EPOCH = 3
    TOPICS = 4
    MEMBER = 5
    TARGET_EPOCH = 6
    TARGET = 7
    CURRENT = 8
    REGEX = 16


NAMED_KINDS: Final = frozenset({Kind.MEMBER, Kind.TARGET, Kind.CURRENT, Kind.REGEX})


class ConsumerKey(NamedTuple):
    """A record's subject: the group, and a member or a regular expression where the kind has one."""

    kind: Kind
    group: str
    name: str


class TopicValue(NamedTuple):
    """A topic that a group subscribes to, as it was when the group last looked."""

    topic_id: bytes
    partitions: int


class ClassicValue(NamedTuple):
    """What a member of the classic protocol said when it joined a group of the consumer protocol."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


class MemberValue(NamedTuple):
    """What a member says of itself."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    regex: str | None
    rebalance_timeout_ms: int
    assignor: str | None
    classic: ClassicValue | None = None


class CurrentValue(NamedTuple):
    """What a member has, and in which epoch."""

    epoch: int
    previous_epoch: int
    state: int
    assigned: Assignment
    revoking: Assignment


class RegexValue(NamedTuple):
    """The topics that a regular expression stood for when it was looked up."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


# -- writing -----------------------------------------------------------------------------------------------------------


def consumer_key(kind: Kind, group: str, name: str = "") -> bytes:
    key = _SHORT.pack(kind) + _plain(group)
    return key + _plain(name) if kind in NAMED_KINDS else key


def epoch_value(epoch: int) -> bytes:
    """Of the group, or of its target assignment."""
    return _SHORT.pack(VERSION) + _INT.pack(epoch) + _NO_TAGS


def topics_value(topics: Mapping[str, TopicValue]) -> bytes:
    parts = [_SHORT.pack(VERSION), _length(len(topics))]
    for name, topic in sorted(topics.items()):
        parts += (topic.topic_id, _text(name), _INT.pack(topic.partitions), _length(0), _NO_TAGS)
    return b"".join((*parts, _NO_TAGS))


def member_value(member: MemberValue) -> bytes:
    parts = [
        _SHORT.pack(VERSION),
        _text(member.instance_id),
        _text(member.rack_id),
        _text(member.client_id),
        _text(member.client_host),
        _length(len(member.topics)),
        *[_text(topic) for topic in member.topics],
        _text(member.regex),
        _INT.pack(member.rebalance_timeout_ms),
        _text(member.assignor),
    ]
    if member.classic is None:
        parts.append(_NO_TAGS)
    else:
        classic = _classic(member.classic)
        parts += (_uvarint(1), _uvarint(CLASSIC_TAG), _uvarint(len(classic)), classic)
    return b"".join(parts)


def _classic(value: ClassicValue) -> bytes:
    """A tagged struct that may be null begins with a byte that says that it is not."""
    parts = [b"\1", _INT.pack(value.session_timeout_ms), _length(len(value.protocols))]
    for name, metadata in value.protocols:
        parts += (_text(name), _length(len(metadata)), metadata, _NO_TAGS)
    return b"".join((*parts, _NO_TAGS))


def target_value(target: Assignment) -> bytes:
    return b"".join((_SHORT.pack(VERSION), *_assignment(target), _NO_TAGS))


def current_value(current: CurrentValue) -> bytes:
    head = _CURRENT.pack(VERSION, current.epoch, current.previous_epoch, current.state)
    return b"".join((head, *_assignment(current.assigned), *_assignment(current.revoking), _NO_TAGS))


def regex_value(value: RegexValue) -> bytes:
    parts = [_SHORT.pack(VERSION), _length(len(value.topics)), *[_text(topic) for topic in value.topics]]
    return b"".join((*parts, _LONG.pack(value.version), _LONG.pack(value.timestamp_ms), _NO_TAGS))


def _assignment(assignment: Assignment) -> list[bytes]:
    parts = [_length(len(assignment))]
    for topic_id, partitions in assignment.items():
        parts += (topic_id, _length(len(partitions)))
        parts += [_INT.pack(index) for index in sorted(partitions)]
        parts.append(_NO_TAGS)
    return parts


def _plain(text: str) -> bytes:
    data = text.encode()
    return _SHORT.pack(len(data)) + data


def _text(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    data = text.encode()
    return _length(len(data)) + data


def _length(count: int) -> bytes:
    return _uvarint(count + 1)


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -- reading -----------------------------------------------------------------------------------------------------------


def decode_consumer_key(data: bytes) -> ConsumerKey | None:
    """What a record is about; None when it is not of the consumer protocol."""
    reader = RecordReader(data)
    try:
        kind = Kind(reader.int16())
    except ValueError:
        return None
    return ConsumerKey(kind, reader.text(), reader.text() if kind in NAMED_KINDS else "")


def _value(data: bytes) -> RecordReader:
    reader = RecordReader(data)
    reader.version(VERSION, VERSION)
    return reader


def decode_epoch(data: bytes) -> int:
    return _value(data).int32()


def decode_topics(data: bytes) -> dict[str, TopicValue]:
    reader = _value(data)
    topics = {}
    for _ in range(reader.count()):
        topic_id, name, count = reader.raw(16), reader.text(), reader.int32()
        for _ in range(reader.count()):  # racks of partitions, which are not kept
            reader.int32()
            reader.texts()
            reader.skip_tags()
        reader.skip_tags()
        topics[name] = TopicValue(topic_id, count)
    return topics


def decode_member(data: bytes) -> MemberValue:
    reader = _value(data)
    member = MemberValue(
        reader.optional_text(),
        reader.optional_text(),
        reader.text(),
        reader.text(),
        tuple(reader.texts()),
        reader.optional_text(),
        reader.int32(),
        reader.optional_text(),
    )
    tagged = reader.tags().get(CLASSIC_TAG)
    return member if tagged is None else member._replace(classic=_decode_classic(tagged))


def _decode_classic(data: bytes) -> ClassicValue | None:
    reader = RecordReader(data, compact=True)
    if reader.int8() < 0:
        return None
    session_ms = reader.int32()
    protocols = []
    for _ in range(reader.count()):
        protocols.append((reader.text(), reader.blob()))
        reader.skip_tags()
    return ClassicValue(session_ms, tuple(protocols))


def decode_target(data: bytes) -> Assignment:
    return _read_assignment(_value(data))


def decode_current(data: bytes) -> CurrentValue:
    reader = _value(data)
    epoch, previous, state = reader.int32(), reader.int32(), reader.int8()
    return CurrentValue(epoch, previous, state, _read_assignment(reader), _read_assignment(reader))


def decode_regex(data: bytes) -> RegexValue:
    reader = _value(data)
    return RegexValue(tuple(reader.texts()), reader.int64(), reader.int64())


def _read_assignment(reader: RecordReader) -> Assignment:
    found = {}
    for _ in range(reader.count()):
        topic_id = reader.raw(16)
        found[topic_id] = frozenset([reader.int32() for _ in range(reader.count())])
        reader.skip_tags()
    return found


# -- the embedded protocol of classic consumers ------------------------------------------------------------------------


class Subscription(NamedTuple):
    """What a classic consumer says of itself in its protocol's metadata."""

    version: int
    topics: tuple[str, ...]
    owned: tuple[tuple[str, tuple[int, ...]], ...]
    rack_id: str | None


def decode_subscription(data: bytes) -> Subscription | None:
    """The metadata of a consumer's protocol; None when it is not one's."""
    try:
        reader = RecordReader(data)
        version = reader.int16()
        topics = tuple(reader.texts())
        reader.blob()
        owned: Sequence[tuple[str, tuple[int, ...]]] = ()
        if version >= 1:
            owned = [
                (reader.text(), tuple([reader.int32() for _ in range(reader.count())]))
                for _ in range(reader.count())
            ]
        if version >= 2:
            reader.int32()
        rack_id = (reader.optional_text() or None) if version >= 3 else None  # librdkafka says "" for none
    except KafkaError:
        return None
    return None if version < 0 else Subscription(version, topics, tuple(owned), rack_id)


def encode_assignment(version: int, topics: Mapping[str, frozenset[int]]) -> bytes:
    """What a classic consumer is assigned, in its protocol's own form."""
    parts = [_SHORT.pack(version), _INT.pack(len(topics))]
    for name, partitions in sorted(topics.items()):
        parts += (_plain(name), _INT.pack(len(partitions)), *[_INT.pack(each) for each in sorted(partitions)])
    return b"".join((*parts, _INT.pack(-1)))


def decode_assignment(data: bytes) -> dict[str, frozenset[int]] | None:
    """The partitions that a classic consumer was assigned, by topic; None when that cannot be read."""
    if not data:
        return {}
    try:
        reader = RecordReader(data)
        reader.int16()
        return {
            reader.text(): frozenset([reader.int32() for _ in range(reader.count())])
            for _ in range(reader.count())
        }
    except KafkaError:
        return None
