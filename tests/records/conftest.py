"""Runs every test that asks for `codec` twice: with the interpreted record codec, and with the compiled one."""

import importlib.machinery
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.records import builder
from headrace.records import codec as chosen

PACKAGE = "headrace.records."


def load_compiled(module_name: str) -> ModuleType | None:
    """The compiled codec, even when the one in use is the interpreted one."""
    name = PACKAGE + module_name
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(chosen.__file__).with_name(module_name + suffix)
        if path.exists():
            loader = importlib.machinery.ExtensionFileLoader(name, str(path))
            spec = importlib.util.spec_from_loader(name, loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            return module
    return None


def load(kind: str, module_name: str = "_codec") -> ModuleType:
    module = chosen.load_interpreted(module_name) if kind == "interpreted" else load_compiled(module_name)
    if module is None:
        pytest.skip(
            "the record codec is not compiled here: no C compiler or no Cython when headrace was set up"
        )
    return module


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def codec(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """One of the two codecs, which the builder uses too for as long as the test runs."""
    module = load(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("decode_records", "encode_record", "encode_records"):
            patch.setattr(builder, name, getattr(module, name))
        yield module


@pytest.fixture(scope="module")
def both_codecs() -> tuple[ModuleType, ModuleType]:
    return load("interpreted"), load("compiled")
