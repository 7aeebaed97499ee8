"""Page of the machine: the device and its host, the memory, the engine thread, the tiers of the KV cache."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal

from kvd.tui.engine_panels import StepPanel, TiersPanel
from kvd.tui.machine_panels import DevicePanel, MemoryPanel
from kvd.tui.page import Key, Page
from kvd.tui.panel import Panel


class MachinePage(Page):
    """Four panels, two by two."""

    title: ClassVar[str] = "Machine"

    DEFAULT_CSS = """
    MachinePage #upper { height: 10; }
    MachinePage #lower { height: 1fr; }
    .-tall MachinePage #upper { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._device = DevicePanel(id="device", classes="box")
        self._memory = MemoryPanel(id="memory", classes="box")
        self._steps = StepPanel(id="steps", classes="box")
        self._tiers = TiersPanel(id="tiers", classes="box")

    def compose(self) -> ComposeResult:
        with Horizontal(id="upper"):
            yield self._device
            yield self._memory
        with Horizontal(id="lower"):
            yield self._steps
            yield self._tiers

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self._device, self._memory, self._steps, self._tiers)

    @property
    def explains(self) -> tuple[tuple[str, tuple[Key, ...]], ...]:
        return (
            (
                "Device",
                (
                    ("busy", "share of the time in which something ran, of all processes"),
                    ("of it kvd", "of the processors or memory, what this server takes"),
                    ("throttled", "why the clocks are lower than they could be"),
                    ("n/a", "the driver or the kernel does not tell"),
                ),
            ),
            (
                "Memory",
                (
                    ("W K A O", "weights, KV cache, activations, left of the limit"),
                    ("a token", "KV bytes of one token of context, all layers"),
                    ("longest", "max_model_len, and how often it fits the pool"),
                ),
            ),
            (
                "Engine thread",
                (
                    ("in steps", "share of the time spent computing; the rest is waiting"),
                    ("a step", "mean of the last seconds, and how many a second"),
                    ("measured", "prefill rate that the scheduler plans with"),
                ),
            ),
            (
                "KV tiers",
                (
                    ("pool", "blocks in use or cached, of all; their bytes"),
                    ("RAM, disk", "what they keep, and what moved to them and back"),
                ),
            ),
        )
