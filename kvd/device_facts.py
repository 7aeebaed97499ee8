"""What is known of the device that computes, and of its host, at one moment. A leaf: the standard library alone.

Drivers, cards and containers differ in what they tell. What is not told is None, which is a value like any other: it is
shown as such, and nobody guesses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One reading.

    utilization         share of the last sampling period, 0 to 1, in which some kernel ran
    memory_used_bytes   by all processes and the driver; memory_own_bytes of these by this process
    power_limit_watts   what the card may draw at most
    throttle_reasons    why the clocks are lower than they could be, in words; () where they are not
    """

    name: str | None = None
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_own_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One reading of the machine that the server runs on.

    num_cpus                what this process may run on
    utilization             share of all processors' time that was not idle since the reading before, 0 to 1
    own_utilization         the same of this process alone, of the processors that it may run on
    memory_total_bytes      of the machine, or what a control group allows where that is less
    memory_available_bytes  what may still be taken without swapping
    memory_own_bytes        resident memory of this process
    """

    cpu_name: str | None = None
    num_cpus: int | None = None
    utilization: float | None = None
    own_utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_own_bytes: int | None = None
