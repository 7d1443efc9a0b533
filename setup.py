"""Builds the optional extensions: the record codec, compiled from the same sources that Python can interpret.

Everything else about the package is in pyproject.toml. Without Cython or a C compiler the install goes on without
them, and says so; `python setup.py build_ext --inplace` builds them in a source tree.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src", "headrace", "records")
NAMES = sorted(path.stem for path in FOLDER.glob("_*.pxd"))


def say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)


class BuildCodec(build_ext):
    """Builds the codec, or says in one line why it will be interpreted."""

    def run(self) -> None:
        super().run()
        built = [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions]
        if built and all(path.exists() for path in built):
            say("record codec compiled")
        elif built:
            say("record codec NOT compiled (no C compiler?): it will be interpreted, many times slower")


def extensions() -> list[Extension]:
    try:
        from Cython.Build import cythonize
    except ImportError:
        say("record codec NOT compiled (no Cython): it will be interpreted, many times slower")
        return []
    codec = [
        Extension(f"headrace.records.{name}", [str(FOLDER / f"{name}.py")], extra_compile_args=["-O3", "-g0"])
        for name in NAMES
    ]
    # The C file is an intermediate product: it belongs under build/, not beside its source.
    built: list[Extension] = cythonize(codec, build_dir="build/cython", include_path=["src"], quiet=True)
    for one in built:
        one.optional = True  # here, because cythonize does not carry it over
    return built


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCodec})
