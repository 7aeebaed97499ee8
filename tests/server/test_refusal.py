"""A request that turns out to be impossible while it runs is the client's to mend, and no fault of the server."""

from __future__ import annotations

import pytest

from kvd.core import TokenEvent
from kvd.errors import RequestError
from kvd.server.generation import _stop_reason


def test_an_answer_that_cannot_follow_its_grammar_is_a_bad_request() -> None:
    event = TokenEvent("r1", None, 3, 0, 2, finish_reason="refused", error="the grammar cannot be followed any further")
    with pytest.raises(RequestError, match="r1 cannot be completed: the grammar cannot be followed") as caught:
        _stop_reason(event)
    assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
