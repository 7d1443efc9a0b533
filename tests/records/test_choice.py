"""Which codec a process gets, and what it must not load to get it."""

import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.records import codec

PURE = {"HEADRACE_PURE": "1"}
COMPILED_PATHS = [
    path
    for suffix in importlib.machinery.EXTENSION_SUFFIXES
    if (path := Path(codec.__file__).with_name("_codec" + suffix)).exists()
]


def run(script: str, env: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints; tests of imports cannot be made in one that has imported."""
    search = [str(Path(codec.__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {search!r}\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={"PATH": "", **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_environment_forces_the_interpreted_codec() -> None:
    script = "from headrace.records import builder, codec; print(codec.COMPILED, type(codec.scan).__name__)"
    assert run(script, PURE) == "False function"


def test_the_compiled_codec_is_taken_where_it_was_built() -> None:
    if not COMPILED_PATHS:
        pytest.skip(
            "the record codec is not compiled here: no C compiler or no Cython when headrace was set up"
        )
    script = "from headrace.records import codec; print(codec.COMPILED, codec._codec.__file__)"
    assert run(script) == f"True {COMPILED_PATHS[0]}"


@pytest.mark.parametrize("env", [{}, PURE])
def test_neither_cython_nor_compression_is_loaded_before_it_is_needed(env: dict[str, str]) -> None:
    script = """
import headrace.records.builder as builder
unwanted = {"cython", "Cython", "cramjam", "zlib", "argparse", "importlib.metadata"} & set(sys.modules)
batch = builder.build_batch([(0, None, b"x", ())])
print(sorted(unwanted), "cramjam" in sys.modules)
builder.build_batch([(0, None, b"x", ())], compression=4)
print("cramjam" in sys.modules)
"""
    assert run(script, env).split("\n") == ["[] False", "True"]


@pytest.mark.parametrize("env", [{}, PURE])
def test_records_survive_pickling_whichever_codec_made_them(env: dict[str, str]) -> None:
    script = """
import pickle
from headrace.records.builder import build_batch, iter_records
records = iter_records(build_batch([(0, b"k", b"v", (("h", None),))]))
print(pickle.loads(pickle.dumps(records)) == records)
"""
    assert run(script, env) == "True"
