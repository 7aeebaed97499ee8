"""Faults that are planted into the code under test, to see that the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from .simulator import simulate

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Planted:
    """first_seed: a world in which the fault shows soon, where it is rare; the search goes on from there."""

    plant: Plant
    first_seed: int

    def must_be_found(self, patch: pytest.MonkeyPatch) -> None:
        self.plant(patch)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check sees it first
            simulate(self.first_seed, 20_000)


def planting(known: dict[str, Planted]) -> Callable[..., Callable[[Plant], Plant]]:
    """A decorator that adds a fault to `known`."""

    def mutation(first_seed: int = 0) -> Callable[[Plant], Plant]:
        def add(plant: Plant) -> Plant:
            known[plant.__name__] = Planted(plant, first_seed)
            return plant

        return add

    return mutation
