"""Which sources, ISA levels and flags the native library is made of. Used by setup.py and by the test builds.

A level is the same set of kernels compiled for more capable processors; which one runs is decided at start by
what the processor has. The compiler is asked whether it knows a level's flags: an old one simply makes fewer levels.

    python packaging/native_build.py OUTPUT [--sanitize] [--emulate]

builds a library by hand: with AddressSanitizer and UBSan, or with the instructions of every level replaced by plain
C++, so that the code of levels that this processor lacks can be run.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels" / "cpu" / "src"

COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-g1", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",  # the arithmetic is stated operation by operation: no silent fma
    "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-fno-omit-frame-pointer")


@dataclass(frozen=True, slots=True)
class Level:
    """name as in KVD_CPU_ISA; flags for the compiler."""

    name: str
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512")
PORTABLE = Level("portable", ())
X86_LEVELS = (
    Level("avx2", _AVX2),
    Level("avxvnni", (*_AVX2, "-mavxvnni")),
    Level("avx512vnni", _AVX512),
    Level("amx", (*_AVX512, "-mamx-tile", "-mamx-int8")),
)


def levels(emulate: bool = False) -> tuple[Level, ...]:
    """The levels that make sense for this machine's architecture, lowest first."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (PORTABLE, *X86_LEVELS) if is_x86 or emulate else (PORTABLE,)


def _knows(compile_one: Callable[[Path, Path, Sequence[str]], None], folder: Path, flags: Sequence[str]) -> bool:
    probe = folder / "probe.cpp"
    probe.write_text("int probe() { return 0; }\n")
    try:
        compile_one(probe, folder / "probe.o", flags)
    except Exception:
        return False
    return True


def _build(
    compile_one: Callable[[Path, Path, Sequence[str]], None],
    folder: Path,
    log: Callable[[str], None],
    *,
    emulate: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    built: list[str] = []
    jobs: list[tuple[Path, Path, tuple[str, ...]]] = []
    shared_defines = ["-DKVD_EMULATE=1"] if emulate else []
    for level in levels(emulate):
        flags = () if emulate else level.flags
        if flags and not _knows(compile_one, folder, flags):
            log(f"kvd: the compiler does not know {' '.join(flags)}: no {level.name} kernels")
            continue
        defines = [f"-DKVD_LEVEL={level.name}", f"-DKVD_LEVEL_{level.name.upper()}=1", *shared_defines]
        target = folder / f"level_{level.name}.o"
        jobs.append((SOURCES / "level.cpp", target, (*COMMON_FLAGS, *flags, *defines, *extra)))
        built.append(level.name)
    defines = [*(f"-DKVD_HAVE_{name.upper()}=1" for name in built), *shared_defines]
    for source in ("runtime.cpp", "pool.cpp", "features.cpp", "blocks.cpp"):
        jobs.append((SOURCES / source, folder / (source + ".o"), (*COMMON_FLAGS, *defines, *extra)))
    # The compiler is a process of its own; a level takes seconds.
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        for finished in [executor.submit(compile_one, *job) for job in jobs]:
            finished.result()
    return [str(target) for _, target, _ in jobs]


def build_objects(compiler: Any, folder: Path, *, log: Callable[[str], None]) -> list[str]:
    """Compile everything with a setuptools compiler object; returns the object files."""

    def compile_one(source: Path, target: Path, flags: Sequence[str]) -> None:
        # One output folder per object: the compiler object names its output after the source alone.
        output = folder / target.stem
        made = compiler.compile([str(source)], output_dir=str(output), extra_postargs=list(flags))
        os.replace(made[0], target)

    return _build(compile_one, folder, log)


def build_library(output: Path, *, sanitize: bool = False, emulate: bool = False) -> None:
    """Build a library with $CXX (c++ unless set), apart from the installed one. CalledProcessError on failure."""
    cxx = os.environ.get("CXX", "c++")
    extra = SANITIZE_FLAGS if sanitize else (("-O2",) if emulate else ())

    def compile_one(source: Path, target: Path, flags: Sequence[str]) -> None:
        subprocess.run([cxx, *flags, "-c", str(source), "-o", str(target)], check=True, capture_output=True, text=True)

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = _build(compile_one, Path(folder), print, emulate=emulate, extra=extra)
        partial = output.with_suffix(".partial")
        subprocess.run(
            [cxx, "-shared", "-pthread", *(SANITIZE_FLAGS if sanitize else ()), *objects, "-o", str(partial)],
            check=True,
        )
        partial.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--emulate", action="store_true")
    arguments = parser.parse_args()
    try:
        build_library(arguments.output, sanitize=arguments.sanitize, emulate=arguments.emulate)
    except subprocess.CalledProcessError as failure:
        sys.exit(failure.stderr or str(failure))


if __name__ == "__main__":
    main()
