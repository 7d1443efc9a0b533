"""The record codec that this process uses: compiled where it was built, interpreted otherwise.

Both come from `_codec.py`. HEADRACE_PURE=1 takes the interpreted one although the other is there, so that
tests and a doubtful user can run either; `COMPILED` says which one it is. Nobody else imports `_codec`.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from headrace.records.batch import BatchInfo, Record, Scan, ScanStop, SegmentScan

_NAME: Final = "headrace.records._codec"


def load_interpreted() -> ModuleType:
    """The codec's source as a module of its own, whether or not a compiled one is there."""
    path = Path(__file__).with_name("_codec.py")
    loader = importlib.machinery.SourceFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if os.environ.get("HEADRACE_PURE") == "1" and _NAME not in sys.modules:
    sys.modules[_NAME] = load_interpreted()

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

COMPILED: Final = not str(_codec.__file__).endswith(".py")

__all__ = [
    "COMPILED",
    "NULL_KEY",
    "NULL_VALUE",
    "BatchInfo",
    "Header",
    "Record",
    "RecordInput",
    "Scan",
    "ScanStop",
    "SegmentScan",
    "check_records",
    "decode_records",
    "encode_record",
    "encode_records",
    "find_offset",
    "find_timestamp",
    "load_interpreted",
    "scan",
    "scan_segment",
]
