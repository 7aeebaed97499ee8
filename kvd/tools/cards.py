"""Graphics cards that `kvd plan` knows by name: memory, and the compute capability that decides whether kvd runs there.

`total_bytes` is what CUDA reports as a card's memory, which is 1 to 4% less than nvidia-smi's figure and the box's;
another driver may say 1% more or less.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kvd.errors import ConfigError
from kvd_kernels.triton.cards import ARCHITECTURES, architecture_of

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuCard:
    """capability: (major, minor). names: further spellings, already `plain`."""

    name: str
    capability: tuple[int, int]
    total_gib: float
    names: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return int(self.total_gib * GIB)


CARDS = (
    GpuCard("RTX 3060 12GB", (8, 6), 11.76, ("3060",)),
    GpuCard("RTX 3080 10GB", (8, 6), 9.78, ("3080",)),
    GpuCard("RTX 3090", (8, 6), 23.69),
    GpuCard("RTX 4060 Ti 16GB", (8, 9), 15.70, ("4060ti",)),
    GpuCard("RTX 4070 Ti SUPER", (8, 9), 15.69, ("4070tis",)),
    GpuCard("RTX 4080", (8, 9), 15.70),
    GpuCard("RTX 4090", (8, 9), 23.64),
    GpuCard("RTX 5070 Ti", (12, 0), 15.47),
    GpuCard("RTX 5080", (12, 0), 15.47),
    GpuCard("RTX 5090", (12, 0), 31.36),
    GpuCard("RTX A4000", (8, 6), 15.73, ("a4000",)),
    GpuCard("RTX A5000", (8, 6), 23.68, ("a5000",)),
    GpuCard("RTX A6000", (8, 6), 47.53, ("a6000",)),
    GpuCard("RTX 6000 Ada", (8, 9), 47.50, ("rtx6000adageneration", "6000ada")),
    GpuCard("RTX PRO 6000 Blackwell", (12, 0), 94.97, ("rtxpro6000", "pro6000")),
    GpuCard("L4", (8, 9), 22.03),
    GpuCard("L40S", (8, 9), 44.39),
    GpuCard("A10", (8, 6), 21.99, ("a10g",)),
    GpuCard("A100 40GB", (8, 0), 39.50, ("a100sxm440gb", "a100pcie40gb")),
    GpuCard("A100 80GB", (8, 0), 79.15, ("a100", "a100sxm480gb", "a100pcie80gb", "a10080gbpcie")),
    GpuCard("H100 80GB", (9, 0), 79.10, ("h100", "h10080gbhbm3", "h100pcie", "h100sxm")),
    GpuCard("H200", (9, 0), 139.80, ("h200sxm",)),
    GpuCard("T4", (7, 5), 14.75, ("teslat4",)),
)
"""Public reports of torch.cuda.mem_get_info and out-of-memory errors are where the totals come from."""


def plain(name: str) -> str:
    """Letters and digits of a card's name, without the vendor's words."""
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    return words.removeprefix("nvidia").removeprefix("geforce")


def _spellings(card: GpuCard) -> set[str]:
    whole = plain(card.name)
    return {whole, whole.removeprefix("rtx"), *card.names, *(f"rtx{name}" for name in card.names if name[0].isdigit())}


def known_card(name: str) -> GpuCard | None:
    """The card of that name, as people or drivers write it."""
    wanted = plain(name)
    return next((card for card in CARDS if wanted in _spellings(card)), None)


def find_card(name: str) -> GpuCard:
    """Raises ConfigError with the nearest names for a card that is not in the table."""
    card = known_card(name)
    if card is not None:
        return card
    spelled = {spelling: card for card in CARDS for spelling in _spellings(card)}
    close = list(dict.fromkeys(spelled[key].name for key in difflib.get_close_matches(plain(name), spelled, 6, 0.5)))
    hint = f"did you mean {' or '.join(slug(each) for each in close[:3])}?" if close else f"there are {card_names()}."
    raise ConfigError(f"--gpu: no card is called {name[:40]!r}; {hint} Or say how much memory it has: --memory 24GiB")


def slug(name: str) -> str:
    """`rtx-4090`: a name that needs no quotes in a shell."""
    return name.lower().replace(" ", "-")


def card_names() -> str:
    """All of them."""
    return ", ".join(slug(card.name) for card in CARDS if not capability_problem(card.name, card.capability))


def capability_problem(name: str, capability: tuple[int, int]) -> str:
    """Why kvd cannot compute on a card, in one line; "" where it can."""
    if architecture_of(*capability) is not None:
        return ""
    known = ", ".join(f"{each // 10}.{each % 10}" for each in ARCHITECTURES)
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, for which kvd has no kernels; it has them for "
        f"{known}"
    )
