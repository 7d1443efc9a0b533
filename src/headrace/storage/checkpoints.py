"""The small files beside the logs: offset checkpoints, `meta.properties`, `partition.metadata`.

Owns their formats, which are Kafka's, and the rule for reading them: an offset checkpoint that cannot be trusted is
logged and counts as empty, because without it a log is only recovered from further back; an identity that cannot be
trusted raises `CorruptIdentity`, because guessing it could mix up data. Files are replaced atomically, so that a crash
leaves the old or the new one. Called by `LogManager`.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from headrace.base.ids import ID_SIZE, format_id, parse_id
from headrace.base.log import get_logger
from headrace.storage.files import FileSystem

RECOVERY_POINTS_NAME = "recovery-point-offset-checkpoint"
LOG_STARTS_NAME = "log-start-offset-checkpoint"
CLEANER_OFFSETS_NAME = "cleaner-offset-checkpoint"
META_PROPERTIES_NAME = "meta.properties"
PARTITION_METADATA_NAME = "partition.metadata"

_OFFSETS_VERSION = 0
_META_VERSION = 1
_PARTITION_METADATA_VERSION = 0

Offsets: TypeAlias = dict[tuple[str, int], int]

logger = get_logger(__name__)


class CorruptIdentity(Exception):
    """A file that says whose data this is, and cannot be read."""


class MetaProperties(NamedTuple):
    """Whose data directory it is."""

    cluster_id: str
    node_id: int
    directory_id: str


def encode_offsets(offsets: Mapping[tuple[str, int], int]) -> bytes:
    """Version, count, then one `topic partition offset` a line."""
    lines = [f"{_OFFSETS_VERSION}\n{len(offsets)}\n"]
    lines += [f"{topic} {partition} {offset}\n" for (topic, partition), offset in offsets.items()]
    return "".join(lines).encode()


def decode_offsets(data: bytes) -> Offsets:
    """The inverse of `encode_offsets`; ValueError when the file is not whole."""
    lines = data.decode().split("\n")
    if lines == [""]:
        return {}  # as Kafka creates it
    if len(lines) < 3 or lines.pop():
        raise ValueError("it ends in the middle of a line")
    version, count = int(lines[0]), int(lines[1])
    if version != _OFFSETS_VERSION:
        raise ValueError(f"unknown version {version}")
    if len(lines) - 2 != count:
        raise ValueError(f"{count} entries promised, {len(lines) - 2} found")
    offsets: Offsets = {}
    for line in lines[2:]:
        topic, partition, offset = line.split(" ")
        offsets[topic, int(partition)] = int(offset)
        if int(partition) < 0 or int(offset) < 0:
            raise ValueError(f"negative number in {line!r}")
    return offsets


class OffsetCheckpoint:
    """One offset checkpoint file."""

    def __init__(self, fs: FileSystem, name: str) -> None:
        self._fs = fs
        self.name = name

    def read(self) -> Offsets:
        """What was written last; empty when there is no such file, or it is damaged."""
        try:
            return decode_offsets(self._fs.read(self.name))
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            logger.warning(
                "offset checkpoint unreadable, starting without it",
                extra={"fields": {"file": self.name, "why": str(error)}},
            )
            return {}

    def write(self, offsets: Mapping[tuple[str, int], int], *, durable: bool = True) -> None:
        """Replace the file; durable when it returns, unless told otherwise. OSError leaves the old one."""
        self._fs.write_atomic(self.name, encode_offsets(offsets), durable=durable)


def encode_meta_properties(meta: MetaProperties) -> bytes:
    return (
        f"version={_META_VERSION}\nnode.id={meta.node_id}\ndirectory.id={meta.directory_id}\n"
        f"cluster.id={meta.cluster_id}\n"
    ).encode()


def decode_meta_properties(data: bytes) -> MetaProperties:
    """CorruptIdentity unless it is a version 1 file with all three ids."""
    try:
        properties: dict[str, str] = {}
        for line in data.decode().splitlines():
            line = line.strip()
            if line and line[0] not in "#!":
                key, _, value = line.partition("=")
                # Java's Properties writes these three with a backslash.
                properties[key.strip()] = (
                    value.strip().replace("\\=", "=").replace("\\:", ":").replace("\\#", "#")
                )
        if properties["version"] != str(_META_VERSION):
            raise ValueError(f"unknown version {properties['version']!r}")
        meta = MetaProperties(
            properties["cluster.id"], int(properties["node.id"]), properties["directory.id"]
        )
        if not meta.cluster_id or not meta.directory_id or meta.node_id < 0:
            raise ValueError("an id is missing")
        return meta
    except KeyError as error:
        raise CorruptIdentity(f"{META_PROPERTIES_NAME} has no {error}") from error
    except ValueError as error:
        raise CorruptIdentity(f"{META_PROPERTIES_NAME}: {error}") from error


def read_meta_properties(fs: FileSystem) -> MetaProperties | None:
    """Whose directory this is; None when it is nobody's yet."""
    try:
        data = fs.read(META_PROPERTIES_NAME)
    except FileNotFoundError:
        return None
    return decode_meta_properties(data)


def write_meta_properties(fs: FileSystem, meta: MetaProperties) -> None:
    fs.write_atomic(META_PROPERTIES_NAME, encode_meta_properties(meta))


def encode_partition_metadata(topic_id: bytes) -> bytes:
    """What `partition.metadata` holds: the id of the topic that the directory belongs to."""
    return f"version: {_PARTITION_METADATA_VERSION}\ntopic_id: {format_id(topic_id)}\n".encode()


def decode_partition_metadata(data: bytes) -> bytes:
    """The topic id; CorruptIdentity when there is none."""
    try:
        fields = dict(line.split(": ", 1) for line in data.decode("ascii").splitlines() if line)
        if fields["version"] != str(_PARTITION_METADATA_VERSION):
            raise ValueError(f"unknown version {fields['version']!r}")
        topic_id = parse_id(fields["topic_id"])
        if topic_id == bytes(ID_SIZE):
            raise ValueError("the topic id is zero")
        return topic_id
    except KeyError as error:
        raise CorruptIdentity(f"{PARTITION_METADATA_NAME} has no {error}") from error
    except ValueError as error:
        raise CorruptIdentity(f"{PARTITION_METADATA_NAME}: {error}") from error


def read_partition_metadata(fs: FileSystem, directory: str, expected: bytes) -> bytes | None:
    """The topic id of a partition directory; None when it says none.

    That is so after a power cut soon after its creation, and also when only a part of the expected id came through.
    """
    try:
        data = fs.read(f"{directory}/{PARTITION_METADATA_NAME}")
    except FileNotFoundError:
        return None
    whole = encode_partition_metadata(expected)
    if data != whole and whole.startswith(data.rstrip(b"\0")):
        return None
    return decode_partition_metadata(data)
