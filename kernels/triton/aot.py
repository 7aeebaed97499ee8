"""Compiles kernels for architectures that need not be at hand and holds the machine code to its budget.

    python -m kvd_kernels.triton.aot [--modules linear,attention] [--architectures 80,90] [--sample] [--jobs N]

Every form that a table of launch configurations can select on a known card (`variants` of each kernel module) must
compile, fit into the shared memory of the architecture, keep everything in registers, load 16 bytes at a time where its
budget says so, and stay within its instructions per element. Exit code 1 where one does not.

The work is done in processes of its own, since Triton's interpreter, once chosen, holds for a whole process. Results
are kept by a hash of kernel source, launch configuration and triton version: only what has changed compiles again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvd_kernels.triton import sass
from kvd_kernels.triton.cards import ARCHITECTURES, KNOWN_CARDS, SHARED_BYTES
from kvd_kernels.triton.variants import ACTIVATION_TYPES, Budget, Variant

MODULES = ("linear", "attention", "rows", "kv_writes", "sampling", "token_kernels")
"""Those with a function `variants(card, dtype)`; a name with a dot is a module outside this package."""
THREADS_PER_WARP = 32
RESERVED_SHARED_BYTES = {80: 0, 86: 0, 89: 0, 90: 1024, 120: 1024}
"""What the assembler counts for the driver, and SHARED_BYTES has left out already."""
PACKAGE = "kvd_kernels.triton"


@dataclass(frozen=True, slots=True)
class Report:
    """What a form compiles to. error: why it does not compile, or ""; the figures mean nothing then.

    registers, stack_bytes, local_bytes per thread; shared_bytes per thread block. What follows is read from the
    instructions, and 0 where the budget asks nothing of them, since reading takes as long as compiling: local_accesses
    touch frame or local memory; loop_… are of the main loop's body, one pass, per thread: instructions, products of
    matrices, bytes from global memory (without bulk copies).
    """

    error: str = ""
    registers: int = 0
    stack_bytes: int = 0
    local_bytes: int = 0
    shared_bytes: int = 0
    local_accesses: int = 0
    wide_loads: int = 0
    instructions: int = 0
    loop_instructions: int = 0
    loop_matrix_products: int = 0
    loop_loaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One form on one architecture. violations: in words, none where all is well."""

    module: str
    kernel: str
    name: str
    architecture: int
    num_warps: int
    budget: Budget
    report: Report
    violations: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.module}: {self.name}, sm_{self.architecture}"

    @property
    def instructions_per_element(self) -> float | None:
        return instructions_per_element(self.report, self.budget, self.num_warps)


@dataclass(frozen=True, slots=True)
class Job:
    module: str
    variant: Variant
    architecture: int
    key: str


def instructions_per_element(report: Report, budget: Budget, num_warps: int) -> float | None:
    """Issued per element and thread in the main loop; None where nothing is to be counted."""
    if not budget.elements_per_iteration:
        return None
    return report.loop_instructions * num_warps * THREADS_PER_WARP / budget.elements_per_iteration


def violations(report: Report, budget: Budget, num_warps: int, architecture: int) -> tuple[str, ...]:
    """What the machine code breaks, in words."""
    if report.error:
        return (f"does not compile: {report.error}",)
    found = []
    if report.shared_bytes > SHARED_BYTES[architecture]:
        found.append(
            f"{report.shared_bytes} bytes of shared memory, sm_{architecture} has {SHARED_BYTES[architecture]}"
        )
    if report.local_accesses or report.stack_bytes or report.local_bytes:
        found.append(
            f"spills or local memory: frame of {report.stack_bytes} bytes, {report.local_bytes} bytes local, "
            f"{report.local_accesses} accesses, {report.registers} registers"
        )
    if report.wide_loads < budget.min_wide_loads:
        found.append(f"{report.wide_loads} 16-byte loads, expected {budget.min_wide_loads}")
    per_element = instructions_per_element(report, budget, num_warps)
    if per_element is not None and not report.loop_instructions:
        found.append("no loop whose instructions could be counted")
    elif per_element is not None and per_element > budget.instructions_per_element:
        found.append(f"{per_element:.2f} instructions per element, budget {budget.instructions_per_element:.2f}")
    return tuple(found)


# --------------------------------------------------------------------------- in a worker


def list_jobs(modules: Sequence[str], architectures: Sequence[int]) -> list[Job]:
    """Every form that can be selected, each once per architecture."""
    jobs: dict[tuple[str, Budget], Job] = {}
    for name in modules:
        module = importlib.import_module(name if "." in name else f"{PACKAGE}.{name}")
        for card in KNOWN_CARDS:
            if card.architecture not in architectures:
                continue
            for dtype in ACTIVATION_TYPES:
                for variant in module.variants(card, dtype):
                    key = _key(variant, card.architecture)
                    jobs.setdefault((key, variant.budget), Job(name, variant, card.architecture, key))
    return list(jobs.values())


def sample(jobs: Sequence[Job]) -> list[Job]:
    """Every kernel once; architectures and forms take turns, so that the sample meets many of them."""
    kernels: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        kernels.setdefault((job.module, job.variant.kernel.__name__), []).append(job)
    chosen = []
    for turn, candidates in enumerate(kernels.values()):
        architectures = sorted({job.architecture for job in candidates})
        architecture = architectures[turn % len(architectures)]
        fitting = [job for job in candidates if job.architecture == architecture]
        chosen.append(fitting[turn % len(fitting)])
    return chosen


def _key(variant: Variant, architecture: int) -> str:
    """A hash of all that the machine code and its report depend on."""
    import triton

    parts = [
        triton.__version__, _inspectors_hash(), str(architecture), variant.kernel.cache_key,
        repr(sorted(variant.signature.items())),
        repr(sorted((name, getattr(value, "cache_key", repr(value))) for name, value in variant.constants.items())),
        repr(sorted(variant.divisible)), repr((variant.num_warps, variant.num_stages)),
        repr(sorted(variant.options.items())), repr(_asks_for_code(variant.budget)),
    ]  # fmt: skip
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _inspectors_hash() -> str:
    assert sass.__file__ is not None
    sources = [Path(__file__), Path(sass.__file__)]
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=8).hexdigest()


def compile_variant(variant: Variant, architecture: int, folder: Path) -> Report:
    """Compile one form, as the launcher would, and read its machine code. folder: for the cubin."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    unknown = set(names) ^ set(variant.signature) | set(variant.divisible) - set(names)
    if unknown:
        return Report(error=f"signature and arguments differ in {', '.join(sorted(unknown))}")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(variant.kernel, {name: variant.signature[name] for name in names}, variant.constants, attributes)
    options = {
        "num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True, **variant.options,
    }  # fmt: skip
    try:
        compiled: Any = triton.compile(
            source, target=GPUTarget("cuda", architecture, THREADS_PER_WARP), options=options
        )
    except Exception as error:  # whatever the compiler raises is the result, and the next form's turn
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return Report(error=words if len(words) <= 600 else f"{words[:300]} … {words[-300:]}")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    resources = sass.resources(cubin)
    report = Report(
        registers=resources.registers,
        stack_bytes=resources.stack_bytes,
        local_bytes=resources.local_bytes,
        shared_bytes=compiled.metadata.shared + max(0, resources.shared_bytes - RESERVED_SHARED_BYTES[architecture]),
    )
    return _with_code(report, sass.disassemble(cubin)) if _asks_for_code(variant.budget) else report


def _asks_for_code(budget: Budget) -> bool:
    return budget.elements_per_iteration > 0 or budget.min_wide_loads > 0


def _with_code(report: Report, code: sass.Code) -> Report:
    loop = code.main_loop()
    return replace(
        report,
        local_accesses=code.local_accesses,
        wide_loads=code.wide_loads,
        instructions=len(code.instructions),
        loop_instructions=len(loop),
        loop_matrix_products=sass.count_matrix(loop),
        loop_loaded_bytes=sum(instruction.loaded_bytes for instruction in loop),
    )


def _reports(jobs: Sequence[Job], cache: Path) -> Iterator[tuple[Job, Report]]:
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            kept = cache / f"{job.key}.json"
            try:
                report = Report(**json.loads(kept.read_text()))
            except (OSError, ValueError, TypeError):  # not there, or cut short by whoever wrote it
                print(f"{job.module}: {job.variant.name}, sm_{job.architecture}", file=sys.stderr, flush=True)
                report = compile_variant(job.variant, job.architecture, Path(folder))
                part = Path(folder) / "report.json"
                part.write_text(json.dumps(asdict(report)))
                _move(part, kept)
            yield job, report


def _move(source: Path, target: Path) -> None:
    """Into place at once, also from another file system: a reader sees all of it or nothing."""
    part = target.with_suffix(f".{os.getpid()}")
    part.write_bytes(source.read_bytes())
    part.replace(target)


def _work(arguments: argparse.Namespace) -> None:
    """The part of one worker, written to arguments.out."""
    jobs = list_jobs(arguments.modules, arguments.architectures)
    if arguments.sample:
        jobs = sample(jobs)
    mine = jobs[arguments.worker :: arguments.jobs]
    outcomes = []
    for job, report in _reports(mine, arguments.cache):
        variant = job.variant
        outcomes.append(
            Outcome(
                job.module, variant.kernel.__name__, variant.name, job.architecture, variant.num_warps, variant.budget,
                report, violations(report, variant.budget, variant.num_warps, job.architecture),
            )
        )  # fmt: skip
    arguments.out.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


# --------------------------------------------------------------------------- in the process that asks


def run(
    cache: Path,
    modules: Sequence[str] = MODULES,
    architectures: Sequence[int] = ARCHITECTURES,
    *,
    is_sample: bool = False,
    jobs: int = 2,
) -> list[Outcome]:
    """Check the forms of these modules in `jobs` processes. RuntimeError, with its last words, where one died."""
    cache.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        # Triton's own files would outlive their use: the reports are what is kept.
        environment["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        command = [
            sys.executable, "-m", f"{PACKAGE}.aot", "--modules", ",".join(modules),
            "--architectures", ",".join(map(str, architectures)), "--cache", str(cache), "--jobs", str(jobs),
            *(["--sample"] if is_sample else []),
        ]  # fmt: skip
        outputs = [Path(folder) / f"{worker}.json" for worker in range(jobs)]
        logs = [output.with_suffix(".log") for output in outputs]
        workers = []
        for worker, (output, log) in enumerate(zip(outputs, logs, strict=True)):
            with log.open("w") as stream:
                own = [*command, "--worker", str(worker), "--out", str(output)]
                workers.append(subprocess.Popen(own, env=environment, stdout=stream, stderr=stream))
        try:
            for process, log in zip(workers, logs, strict=True):
                if code := process.wait():
                    raise RuntimeError(f"a compiling process ended with {code}:\n{log.read_text()[-4000:]}")
        finally:
            for process in workers:
                process.kill()
                process.wait()
        outcomes = [_outcome(entry) for output in outputs for entry in json.loads(output.read_text())]
    return sorted(outcomes, key=lambda outcome: (outcome.module, outcome.architecture, outcome.name))


def _outcome(entry: dict[str, Any]) -> Outcome:
    entry = dict(entry, budget=Budget(**entry["budget"]), report=Report(**entry["report"]))
    return Outcome(**dict(entry, violations=tuple(entry["violations"])))


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per form; what it breaks below it."""
    width = max((len(outcome.label) for outcome in outcomes), default=0)
    lines = [f"{'':{width}} registers  shared  16-byte loads  loop: instructions  products  per element (budget)"]
    for outcome in outcomes:
        report, per_element = outcome.report, outcome.instructions_per_element
        count = "" if per_element is None else f"{per_element:.2f} ({outcome.budget.instructions_per_element:.2f})"
        lines.append(
            f"{outcome.label:{width}} {report.registers:9} {report.shared_bytes:7} {report.wide_loads:14} "
            f"{report.loop_instructions:19} {report.loop_matrix_products:9}  {count}"
        )
        lines += [f"    {violation}" for violation in outcome.violations]
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not set(numbers) <= set(ARCHITECTURES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(map(str, ARCHITECTURES))}")
    return numbers


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--modules", type=_names, default=list(MODULES), help="kernel modules, with commas between")
    parser.add_argument("--architectures", type=_numbers, default=list(ARCHITECTURES), help="such as 80,90")
    parser.add_argument("--sample", action="store_true", help="every kernel once instead of every form")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--cache", type=Path, default=Path("build/aot"), help="folder of the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        _work(arguments)
        return
    begun = time.monotonic()
    outcomes = run(
        arguments.cache, arguments.modules, arguments.architectures, is_sample=arguments.sample, jobs=arguments.jobs
    )
    broken = sum(bool(outcome.violations) for outcome in outcomes)
    print(table(outcomes))
    print(f"{len(outcomes)} forms in {time.monotonic() - begun:.1f} s, {broken} of them broken")
    if broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
