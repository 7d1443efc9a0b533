"""Records that a disk does not give back as they were: found where there is doubt, and replaced by the leader's.

What a leader sends is never read by it, so damage shows at the other end: a follower checks every batch and asks again
for what is not good. Then the leader looks (`find_damage`), resigns if it is its own disk, and as a follower, out of
the ISR, puts the segment aside and fetches it (`put_aside`). Called by `Replicas`.
"""

from headrace.base.errors import ErrorCode, KafkaError
from headrace.records.batch import crc_ok, parse_header
from headrace.replication.partition import Partition
from headrace.storage import trims


def find_damage(partition: Partition, offset: int, max_bytes: int) -> int | None:
    """The first batch from `offset` on that is not as it was written; None when all of them are."""
    log = partition.log
    try:
        data = log.read(offset, max_bytes, max_offset=log.log_end_offset).read()
        position = 0
        while position < len(data):
            header = parse_header(data, position)
            if not crc_ok(data, position, header.size):
                return offset
            position += header.size
            offset = header.next_offset
    except KafkaError as error:
        if error.code is ErrorCode.CORRUPT_MESSAGE:
            return offset
    return None


def put_aside(partition: Partition) -> bool:
    """Put aside the segment with the damage, and drop what follows it, to be fetched again; whether that was done.

    Only outside the ISR: a member of it must not lose what others count on it to have. OSError when the disk refuses;
    the damage is forgotten by the caller, once the cut is written down.
    """
    if partition.damaged_at is None or partition.is_leader or partition.node_id in partition.isr:
        return False
    end = partition.log.log_end_offset
    if partition.damaged_at < end:
        end = trims.quarantine(partition.log, partition.damaged_at)
    partition.high_watermark = min(partition.high_watermark, end)
    return True
