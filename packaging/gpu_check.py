"""Checks and times the GPU path on the card at hand, from the source tree. Started by gpu_check.sh.

Parts run one after the other, each in a process of its own with a time limit, so that a kernel that hangs or kills its
CUDA context takes one part with it and no more. `--dry` runs the same code on the CPU, with tiny shapes and interpreted
kernels, in one process: its rates mean nothing, and its checks do.

Exit code: 0 when every check holds, 1 when one does not, 2 where there is no GPU that kvd can use. A rate below its
target is shown, and fails nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_check_world import Line

ROOT = Path(__file__).resolve().parent.parent
OLDEST = {"torch": (2, 11), "triton": (3, 6), "numpy": (1, 26)}
TOTAL_SECONDS = 345
PART_SECONDS = {"quick": 100, "model": 150, "attention": 60, "blocks": 30, "rates": 110, "cases": 150}
"""Every part and its limit, in the order in which they run: what would be missed most comes first."""


def map_sources() -> None:
    """Make kvd, kvd_kernels and the tests' case tables importable where nothing is installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]
    folder = ROOT / "kernels"
    spec = importlib.util.spec_from_file_location(
        "kvd_kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["kvd_kernels"] = package
    spec.loader.exec_module(package)


def missing_packages() -> str:
    """What is absent or too old, in words; empty where nothing is."""
    lacking = []
    for name, oldest in OLDEST.items():
        wanted = f"{name} {'.'.join(map(str, oldest))} or later"
        try:
            version = importlib.import_module(name).__version__
        except ImportError:
            lacking.append(f"{wanted} (there is none)")
            continue
        if tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2]) < oldest:
            lacking.append(f"{wanted} (this is {version})")
    return ", ".join(lacking)


def run_part(name: str, *, is_dry: bool, seconds: float) -> list[Line]:
    """One part, in this process. A failure of any kind is a line of the result."""
    from gpu_check_world import Line, open_world

    try:
        part = importlib.import_module(f"gpu_check_{name}")
        lines: list[Line] = part.run(open_world(is_dry=is_dry, seconds=seconds))
    except Exception as error:  # whatever it is, the other parts are worth running
        traceback.print_exc()
        text = str(error).strip().splitlines()
        return [Line(name, f"{type(error).__name__}: {text[0] if text else ''}"[:90], "FAILED", is_failure=True)]
    return lines


def run_part_apart(name: str, limit: float, seconds: float) -> list[Line]:
    """One part in a process of its own."""
    from gpu_check_world import Line

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "lines.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--seconds", str(seconds)]
        environment = {**os.environ, "GPU_CHECK_RESULT": str(result), "GPU_CHECK_LIMIT": str(limit)}
        try:
            code = subprocess.run(command, env=environment, timeout=limit, check=False).returncode
            outcome = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"took longer than {limit:.0f} s"
        lines = [Line(**line) for line in json.loads(result.read_text())] if result.exists() else []
    return lines or [Line(name, outcome, "FAILED", is_failure=True)]


def table(lines: list[Line]) -> str:
    width = max((len(line.name) for line in lines), default=0)
    rows = [f"{'part':10} {'':{width}} {'result':>28}  target"]
    rows += [f"{line.part:10} {line.name:{width}} {line.result:>28}  {line.target}".rstrip() for line in lines]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes and interpreted kernels")
    parser.add_argument("--only", default=",".join(PART_SECONDS), help=f"of {', '.join(PART_SECONDS)}")
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each measurement")
    parser.add_argument("--part", choices=tuple(PART_SECONDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PART_SECONDS):
        parser.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(PART_SECONDS)}")
    # Triton reads these when it is imported.
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if lacking := missing_packages():
        print(f"gpu_check: this needs {lacking}; PYTHON=… names another interpreter", file=sys.stderr)
        return 2
    map_sources()
    if options.part is not None:
        lines = run_part(options.part, is_dry=False, seconds=options.seconds)
        Path(os.environ["GPU_CHECK_RESULT"]).write_text(json.dumps([asdict(line) for line in lines]))
        return 0
    from gpu_check_world import describe_machine, why_unusable

    if not options.dry and (reason := why_unusable()):
        print(f"gpu_check: no GPU to check: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()
    facts = describe_machine(is_dry=options.dry)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    lines = []
    for name, limit in PART_SECONDS.items():
        if name not in wanted:
            continue
        left = TOTAL_SECONDS - (time.monotonic() - started)
        begun = time.monotonic()
        if options.dry:
            lines += run_part(name, is_dry=True, seconds=0.0)
        else:
            lines += run_part_apart(name, max(5.0, min(limit, left)), options.seconds)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    failures = [line for line in lines if line.is_failure]
    print(table(lines))
    print(f"{len(lines) - len(failures)} lines hold, {len(failures)} failed, {seconds:.0f} s")
    target = Path(os.environ.get("OUT") or ".") / "gpu_check.json"
    content = {**facts, "is_dry": options.dry, "seconds": seconds, "lines": [asdict(line) for line in lines]}
    target.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
