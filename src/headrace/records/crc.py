"""CRC-32C (Castagnoli), the checksum of record batches, from the `crc32c` package.

The package's own `__init__` loads argument parsing and distribution metadata, which cost a broker 60 ms of
start-up and 7 MB for good; the extension module in it needs neither, so it is loaded by itself. Where that
does not work out (an unusual import system), the package is imported in the ordinary way: the function is
the same.

Callers: the batch header and the codec.
"""

import importlib.machinery
import importlib.util
from collections.abc import Callable
from typing import Final

_Crc32c = Callable[[bytes | bytearray | memoryview], int]


def _extension_alone() -> _Crc32c | None:
    package = importlib.util.find_spec("crc32c")
    if package is None or package.submodule_search_locations is None:
        return None
    spec = importlib.machinery.PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: _Crc32c | None = getattr(module, "crc32c", None)
    return function


def _load() -> _Crc32c:
    function = _extension_alone()
    if function is None:
        from crc32c import crc32c as function_of_package

        function = function_of_package
    assert function(b"123456789") == 0xE3069283, "the crc32c package does not compute CRC-32C"
    return function


crc32c: Final = _load()
