from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.observe.doctor import Doctor
from tests.observe.doctor_cases import Clinic, decode


@pytest.fixture
def clinic() -> Iterator[Clinic]:
    """A doctor that takes the time it needs."""
    doctor = Doctor(decode, share=1.0)
    yield Clinic(doctor)
    doctor.close()
