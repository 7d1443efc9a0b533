"""The file that a node must not lose: its term and its vote, beside the metadata log.

JSON in the manner of Kafka's `quorum-state`, replaced as one step and synced. Invariant: a reader finds a state that
was written whole, or no file when none ever was; anything else is damage and is refused, because a vote that is guessed
may be a second one in the same term. Called by the durable storage; `write_state` runs in a thread with its sync.
"""

import json
from typing import Final

from headrace.base.errors import ErrorCode, KafkaError
from headrace.consensus.raft.messages import HardState
from headrace.storage.files import FileSystem

FILE_NAME: Final = "quorum-state"
NO_NODE: Final = -1
VERSION: Final = 1
NO_DIRECTORY: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # Kafka's id of none


def encode_state(state: HardState) -> bytes:
    """The content of the file. The leader is not told: it is whoever is heard of next."""
    content = {
        "leaderId": NO_NODE,
        "leaderEpoch": state.term,
        "votedId": NO_NODE if state.vote is None else state.vote,
        "votedDirectoryId": NO_DIRECTORY,
        "data_version": VERSION,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_state(data: bytes) -> HardState:
    """The state that a file of this content tells. ValueError when it tells none."""
    content = json.loads(data)
    if not isinstance(content, dict) or content.get("data_version") not in (0, VERSION):
        raise ValueError("no state of a version that is known")
    term, vote = content["leaderEpoch"], content["votedId"]
    if type(term) is not int or type(vote) is not int or term < 0 or vote < NO_NODE:
        raise ValueError("no term and vote")
    return HardState(term, None if vote == NO_NODE else vote)


def read_state(fs: FileSystem, directory: str) -> HardState:
    """The state of the node whose metadata log is in `directory`. KafkaError when the file is damaged."""
    path = f"{directory}/{FILE_NAME}"
    try:
        data = fs.read(path)
    except FileNotFoundError:
        return HardState()
    try:
        return decode_state(data)
    except (ValueError, KeyError) as error:
        raise KafkaError(
            ErrorCode.KAFKA_STORAGE_ERROR, f"{path} is damaged ({error}): this node cannot know how it voted"
        ) from None


def write_state(fs: FileSystem, directory: str, state: HardState) -> None:
    """Make a state durable."""
    fs.write_atomic(f"{directory}/{FILE_NAME}", encode_state(state))
