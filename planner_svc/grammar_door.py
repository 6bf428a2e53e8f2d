"""Has the executor make constraints ready before their requests are accepted, so that no iteration waits for it."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from planner_svc import refusals
from planner_svc.constraints import Constraint, ConstraintError, grammar_of
from planner_svc.executor_client import ExecutorLostError
from svc_common.errors import invalid_argument

_MAX_LOSSES = 3
_FORGET_S = 600.0
_MAX_NOTED = 256


class GrammarDoor:
    """A grammar at which the executor is lost each time is refused for a while: it may be what brings it down."""

    def __init__(self, compile_grammar: Callable[[str], Awaitable[str]]) -> None:
        """`compile_grammar` has the executor make a grammar ready and returns why it can't, or nothing.

        It raises ExecutorLostError.
        """
        self._compile_grammar = compile_grammar
        self._losses: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By grammar: how often the executor was lost at it, and when last."""

    async def make_ready(self, constraint: Constraint) -> str:
        """The constraint as a grammar. Raises ServiceError."""
        field = f"request.constraint.{constraint.kind}"
        try:
            grammar = await asyncio.to_thread(grammar_of, constraint)
        except ConstraintError as refusal:
            raise invalid_argument(field, str(refusal), "CONSTRAINT_UNSUPPORTED") from refusal
        num_losses = self._num_losses(grammar)
        if num_losses >= _MAX_LOSSES:
            raise refusals.breaks_compiler(num_losses)
        try:
            error = await self._compile_grammar(grammar)
        except ExecutorLostError as lost:
            self._note_loss(grammar, num_losses + 1)
            raise refusals.executor_lost(0.0, 1.0) from lost
        self._losses.pop(grammar, None)
        if error:
            raise invalid_argument(field, error, "CONSTRAINT_UNSUPPORTED")
        return grammar

    def _num_losses(self, grammar: str) -> int:
        """Of late, without a success in between."""
        num, last_s = self._losses.get(grammar, (0, 0.0))
        return num if time.monotonic() - last_s < _FORGET_S else 0

    def _note_loss(self, grammar: str, num_losses: int) -> None:
        self._losses[grammar] = num_losses, time.monotonic()
        self._losses.move_to_end(grammar)
        if len(self._losses) > _MAX_NOTED:
            self._losses.popitem(last=False)
