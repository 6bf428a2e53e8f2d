"""Puts the batch of one iteration together and chooses the mode: greedily, the more tokens per second (NEO)."""

from dataclasses import dataclass

from planner_svc.estimator import Calibration, Estimator
from planner_svc.scheduler.balance import Balance, is_aged
from planner_svc.scheduler.batch import Batch, Chunk
from planner_svc.scheduler.limits import ModePolicy
from planner_svc.scheduler.placement import Decodes
from planner_svc.scheduler.sequence import Sequence

_SHORTEST_S = 1e-9
"""An estimator without measurements says 0."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The batch to run and what is thought of it."""

    batch: Batch
    uncalibrated_s: float
    """The estimator's word."""
    passed_over: tuple[Sequence, ...]
    """Could have run, and did not for the sake of balance or throughput."""


def decide(
    estimator: Estimator,
    calibration: Calibration,
    policy: ModePolicy,
    chunks: list[Chunk],
    decodes: Decodes,
    residents: list[Sequence],
    swap_bytes: int,
) -> Decision:
    """Chooses among what has room. Changes nothing outside the batch it returns."""
    pipelined = Batch(chunks, decodes.gpu)
    balance = Balance(estimator, pipelined)
    nothing_else = not chunks and not decodes.gpu
    balance.place_cpu_decodes(decodes.host, waive=policy == "asymmetric" or nothing_else)
    held_back = balance.hold_back_host_prompts(residents) if policy == "auto" else []
    candidates = [pipelined] if policy != "auto" or not decodes.host else _choices(pipelined, decodes.host)
    seconds = [estimator.iteration_s(*candidate.loads(), swap_bytes) for candidate in candidates]

    def tokens_per_s(index: int) -> float:
        predicted_s = seconds[index] * calibration.factor(candidates[index].mode)
        return candidates[index].tokens_out / max(predicted_s, _SHORTEST_S)

    best = max(range(len(candidates)), key=tokens_per_s)  # of equals the first, and so the simplest
    batch = candidates[best]
    running = {sequence.sequence_id for part in batch.cpu_decodes for sequence in part}
    passed_over = [sequence for sequence in decodes.host if sequence.sequence_id not in running]
    return Decision(batch, seconds[best], (*passed_over, *held_back))


def _choices(pipelined: Batch, host_decodes: list[Sequence]) -> list[Batch]:
    """GPU-only, one batch and two sub-batches, as far as they keep liveness.

    One batch with all CPU decodes beside the GPU's attention of the same layer leaves the weights to be read once:
    with few CPU decodes a second sub-batch costs more than it hides.
    """
    must_run = any(is_aged(sequence) for sequence in host_decodes)
    gpu_only = Batch(pipelined.chunks, pipelined.gpu_decodes)
    one_batch = Batch(pipelined.chunks, pipelined.gpu_decodes, (host_decodes, []))
    choices = [one_batch, pipelined]
    if gpu_only.has_work and not must_run:
        choices.insert(0, gpu_only)
    return choices
