"""What one planning pass may still hand out, and what it has handed out. Thrown away after the pass.

Owner: the `Scheduler.plan` call that made it.
"""

from __future__ import annotations

from kvd.cache.manager import PhysicalBlock
from kvd.core import PlanItem
from kvd.scheduler.request_state import RequestState

UNKNOWN_TOKEN = -1
"""Stands for a token whose step is in flight; no embedding has it, so that nobody computes it by mistake."""


class Budget:
    """One token budget for decodes, running prefills and admissions, in that order of asking, and one for restores.

    `admissions_open` is closed when a running request lacked blocks in this pass: a newcomer would take
    them away again.
    """

    __slots__ = (
        "admissions_open",
        "items",
        "restored",
        "restores_left",
        "retired",
        "states",
        "tokens_left",
    )

    def __init__(self, num_tokens: int, num_restores: int) -> None:
        self.tokens_left = num_tokens
        self.restores_left = num_restores  # blocks
        self.restored: list[tuple[RequestState, int]] = []  # (request, tokens in place)
        self.retired: list[PhysicalBlock] = []  # given up, and not to be reused before this plan has been run
        self.admissions_open = True
        self.items: list[PlanItem] = []
        self.states: list[RequestState] = []  # parallel to items

    def close_admissions(self) -> None:
        self.admissions_open = False

    def grant(self, state: RequestState, num_tokens: int) -> None:
        """The request's next tokens. The caller knows that it has blocks for them."""
        start = state.num_planned
        assert 0 < num_tokens <= state.num_to_plan, f"{state.request.request_id}: {num_tokens} tokens to grant"
        assert state.slot is not None
        end = start + num_tokens
        samples = end == len(state.token_ids) + state.num_pending
        token_ids = tuple(state.token_ids[start:end])
        is_unknown = len(token_ids) < num_tokens
        if is_unknown:
            assert samples, "only the newest token can be in flight"
            token_ids = (*token_ids, UNKNOWN_TOKEN)
        block_tables, first_positions = state.blocks.views(end)
        self.items.append(
            PlanItem(
                state.request.request_id,
                state.slot,
                start,
                token_ids,
                block_tables,
                first_positions,
                samples,
                is_unknown,
                state.forgetting is not None and state.forgetting.wants_mass,
                state.num_to_score(start, end),
            )
        )
        self.states.append(state)
        self.tokens_left -= num_tokens
        state.num_planned = end
        state.num_in_flight += 1
        state.num_pending += samples

    def grant_newest(self, state: RequestState) -> None:
        """`grant` of the one token that a request which has caught up lacks: most of what most plans do."""
        start = state.num_planned
        token_ids = state.token_ids
        is_known = start < len(token_ids)
        block_tables, first_positions = state.blocks.views(start + 1)
        assert state.slot is not None
        self.items.append(
            PlanItem(
                state.request.request_id,
                state.slot,
                start,
                (token_ids[start] if is_known else UNKNOWN_TOKEN,),
                block_tables,
                first_positions,
                True,
                not is_known,
                state.forgetting is not None and state.forgetting.wants_mass,
            )
        )
        self.states.append(state)
        self.tokens_left -= 1
        state.num_planned = start + 1
        state.num_in_flight += 1
        state.num_pending += 1

    def num_savable(self, state: RequestState) -> int:
        """Tokens of a request that are in place before this plan is run: its saves come first."""
        if any(state is restored for restored, _ in self.restored):
            return 0
        return next(
            (item.start for item, of in zip(self.items, self.states, strict=True) if of is state), state.num_planned
        )
