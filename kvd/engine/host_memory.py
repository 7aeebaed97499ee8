"""How much memory this process may still take, and how much it has taken. Linux; torch-free."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_bytes() -> int:
    """Free memory as the kernel estimates it (MemAvailable), or what the control group still allows if less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise OSError("/proc/meminfo has no MemAvailable line")
    limits = [
        _headroom(_CGROUP_V2, "memory.max", "memory.current", "inactive_file"),
        _headroom(_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    return min([available, *(limit for limit in limits if limit is not None)])


def _headroom(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    """Bytes below the limit of a control group; None without one. Pages of files that nobody reads count as free."""
    try:
        limit, usage = (group / limit_name).read_text().strip(), int((group / usage_name).read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - usage + _reclaimable_bytes(group, reclaimable_name))


def _reclaimable_bytes(group: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def reset_peak() -> bool:
    """Start a new high-water mark for `peak_bytes`; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Highest resident memory since the mark was reset."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field} line")
