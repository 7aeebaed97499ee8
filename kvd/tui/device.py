"""What computes, in a few words, and one line about how it is, for the border of a panel. Pure functions."""

from __future__ import annotations

from kvd.device_facts import DeviceFacts
from kvd.tui.format import clean, size
from kvd.views import EngineInfo

ABSENT = "n/a"


def computes_on(info: EngineInfo, facts: DeviceFacts | None) -> str:
    """`NVIDIA H200`, or `CPU avx2, 2 threads`: what a person calls it, not what the backend does."""
    if info.device.startswith("cuda"):
        # The label of a backend for cards ends with the card: `triton sm_90, NVIDIA H200`.
        return (facts.name if facts is not None else None) or info.backend.partition(", ")[2] or info.device
    if info.device == "cpu":
        return f"CPU {info.backend.removeprefix('native').strip()}".strip()
    return info.device


def pool_name(info: EngineInfo) -> str:
    """What to call the KV pool: by the card's memory, where it lies there."""
    return "GPU" if info.device.startswith("cuda") else "pool"


def device_line(facts: DeviceFacts | None, width: int) -> str:
    """Utilisation, memory, power, temperature, clock and why it is throttled: as many of these as fit; empty without
    a device. What the driver does not tell reads n/a.
    """
    if facts is None:
        return ""
    parts = [
        f"GPU {_percent(facts.utilization)}",
        _memory(facts),
        f"{_number(facts.power_watts)}/{_number(facts.power_limit_watts)} W",
        f"{_number(facts.temperature_celsius)} °C",
        f"{_number(facts.sm_clock_mhz)} MHz",
    ]
    if facts.throttle_reasons is None:
        parts.append(f"throttling {ABSENT}")
    elif facts.throttle_reasons:
        # What slows the card down is worth more than its clock.
        parts.insert(1, "throttled: " + clean(", ".join(facts.throttle_reasons)))
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 3 > width:
            break
        line += f" · {part}"
    return line


def _memory(facts: DeviceFacts) -> str:
    used, total, own = facts.memory_used_bytes, facts.memory_total_bytes, facts.memory_own_bytes
    text = f"{ABSENT if used is None else size(used)} of {ABSENT if total is None else size(total)}"
    if used is not None and own is not None and used > own:
        text += f", others {size(used - own)}"
    return text


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}"
