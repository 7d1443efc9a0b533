"""The record codec that this process uses: compiled where it was built, interpreted otherwise.

Both come from one source, `_codec.py`, with `_sending.py` for what a producer does for every record; `compaction` and
`columns` add what only some need. HEADRACE_PURE=1 takes the
interpreted ones although the others are there, so that tests and a doubtful user can run either; `COMPILED` says which
it is. Nobody else imports them.
"""

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Final

from headrace.records.batch import BatchInfo, Record, Scan, ScanStop, SegmentScan

_PACKAGE: Final = "headrace.records."
_MODULES: Final = ("_arrow", "_arrow_rows", "_codec", "_compaction", "_sending")


def load_interpreted(module_name: str = "_codec") -> ModuleType:
    """The source of one of them as a module of its own, whether or not a compiled one is there."""
    path = os.path.join(os.path.dirname(__file__), module_name + ".py")
    name = _PACKAGE + module_name
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if os.environ.get("HEADRACE_PURE") == "1":
    for _name in _MODULES:
        if _PACKAGE + _name not in sys.modules:
            sys.modules[_PACKAGE + _name] = load_interpreted(_name)

from headrace.records import _codec  # noqa: E402  (after the choice above)
from headrace.records._codec import (  # noqa: E402
    NULL_KEY,
    NULL_VALUE,
    Header,
    RecordInput,
    check_records,
    decode_records,
    encode_record,
    encode_records,
    find_offset,
    find_timestamp,
    scan,
    scan_segment,
)
from headrace.records._sending import (  # noqa: E402
    Delivery,
    Pending,
    Portal,
    RecordBuffer,
    RecordMetadata,
    Route,
    SendPath,
    key_partition,
    murmur2,
)

COMPILED: Final = not str(_codec.__file__).endswith(".py")

__all__ = [
    "COMPILED",
    "NULL_KEY",
    "NULL_VALUE",
    "BatchInfo",
    "Delivery",
    "Header",
    "Pending",
    "Portal",
    "Record",
    "RecordBuffer",
    "RecordInput",
    "RecordMetadata",
    "Route",
    "Scan",
    "ScanStop",
    "SegmentScan",
    "SendPath",
    "check_records",
    "decode_records",
    "encode_record",
    "encode_records",
    "find_offset",
    "find_timestamp",
    "key_partition",
    "load_interpreted",
    "murmur2",
    "scan",
    "scan_segment",
]
