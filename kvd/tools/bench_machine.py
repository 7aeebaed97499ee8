"""The machine that a benchmark ran on, as far as it says so itself. Reads /proc where there is one."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_CPU_INFO = Path("/proc/cpuinfo")
_INTERESTING_FLAGS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm")


def describe_machine() -> dict[str, Any]:
    """CPU model, instruction sets that matter here, logical CPUs, those we may use, memory in bytes, system."""
    model, flags = cpu_facts(_read(_CPU_INFO))
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "instruction_sets": [flag for flag in _INTERESTING_FLAGS if flag in flags],
        "logical_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_facts(text: str) -> tuple[str, frozenset[str]]:
    """(model name, flags) of the first processor in /proc/cpuinfo; empty where it has no such lines, as on some ARM."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            facts.setdefault(name.strip().lower(), value.strip())
    flags = facts.get("flags") or facts.get("features") or ""
    return facts.get("model name", ""), frozenset(flags.split())


def machine_line(machine: dict[str, Any]) -> str:
    """One line for people."""
    cpus = machine["usable_cpus"] or machine["logical_cpus"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    return f"{machine['cpu']}, {cpus} CPUs{memory}, {machine['system']}"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
