"""The planner as its watchdog sees it: does anything move, and if not, what stands where."""

import time
from collections.abc import Iterator

from planner_svc.engine import Engine
from planner_svc.executor_loop import ExecutorLoop
from planner_svc.scheduler import Sequence
from svc_common.plan import Tier
from svc_common.plan_text import plan_text, result_text

_MOST_SEQUENCES = 300
_COLUMNS = "sequence request class state tier blocks prompt computed/to-prefill tokens/most in-flight passed-over again"


class PlannerWatch:
    """See svc_common.watchdog.Watched."""

    def __init__(self, engine: Engine, loop: ExecutorLoop) -> None:
        self._engine = engine
        self._loop = loop

    def stall(self) -> str | None:
        if self._engine.is_alive():
            return None
        return f"{len(self._engine.in_hand)} requests in hand and no result for {self._engine.standing_s:.1f} s"

    async def ask(self) -> str:
        return await self._loop.describe()

    def report(self) -> str:
        engine, load = self._engine, self._engine.load()
        pools = " + ".join(map(str, load.pool_blocks_used)) or "0"
        return "\n".join(
            [
                f"{self._loop.state_text}; ready {engine.is_ready()}, draining {engine.is_draining}",
                f"requests: {load.num_running} run, {load.num_waiting} of at most {load.max_waiting} wait",
                f"blocks: GPU {load.gpu_blocks_used} of {load.gpu_blocks}, host {pools} of {load.host_blocks}",
                f"last plan: {plan_text(engine.last_plan)}",
                f"last result: {result_text(engine.last_result)}",
                *self._sequences(time.monotonic()),
            ]
        )

    def _sequences(self, now: float) -> Iterator[str]:
        yield _COLUMNS
        sequences = list(self._engine.sequences)
        for sequence, request_id in sequences[:_MOST_SEQUENCES]:
            yield _line(sequence, request_id, now)
        if len(sequences) > _MOST_SEQUENCES:
            yield f"and {len(sequences) - _MOST_SEQUENCES} more"


def _line(sequence: Sequence, request_id: str, now: float) -> str:
    request = sequence.request
    tier = "gpu" if sequence.tier is Tier.GPU else f"host{sequence.pool}"
    due = f" due in {sequence.due_s - now:.2f} s" if request.targets else ""
    return (
        f"{sequence.sequence_id} {request_id!r} {request.service_class.name} {sequence.state.value} "
        f"{tier if sequence.blocks else '-'} {len(sequence.blocks)} {len(request.prompt)} "
        f"{sequence.num_computed_tokens}/{sequence.num_prefill_tokens} "
        f"{len(sequence.outputs)}/{request.max_new_tokens} {sequence.num_in_flight} {sequence.num_passed_over} "
        f"{sequence.num_recomputations}{' late' if sequence.is_late else ''}{due}"
    )
