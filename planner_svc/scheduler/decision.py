"""Puts the batch of one iteration together and chooses the mode: greedily, the more tokens per second (NEO)."""

from dataclasses import dataclass

from planner_svc.estimator import Calibration, Estimator
from planner_svc.plan import Mode
from planner_svc.scheduler.balance import Balance, is_aged
from planner_svc.scheduler.batch import Batch, Chunk
from planner_svc.scheduler.limits import ModePolicy
from planner_svc.scheduler.placement import Decodes
from planner_svc.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Decision:
    """The batch to run and what is thought of it."""

    batch: Batch
    mode: Mode
    uncalibrated_s: float
    """The estimator's word; 0 where nothing is computed."""
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
    """Chooses among what has room. The decision alone changes nothing outside the batch it returns."""
    batch = Batch(chunks, decodes.gpu)
    balance = Balance(estimator, batch)
    nothing_else = not chunks and not decodes.gpu
    balance.place_cpu_decodes(decodes.host, waive=policy == "asymmetric" or nothing_else)
    held_back = balance.hold_back_host_prompts(residents) if policy == "auto" else []

    def predict(candidate: Batch) -> float:
        return estimator.iteration_s(*candidate.loads(), swap_bytes)

    seconds = predict(batch)
    if policy == "auto" and batch.num_cpu_decodes and (batch.chunks or batch.gpu_decodes):
        gpu_only = batch.without_cpu_decodes()
        gpu_only_s = predict(gpu_only)
        must_run = any(is_aged(sequence) for part in batch.cpu_decodes for sequence in part)
        # Cross-multiplied rates: no division by a prediction of 0.
        asymmetric_is_slower = batch.tokens_out * gpu_only_s * calibration.factor(
            Mode.GPU_ONLY
        ) <= gpu_only.tokens_out * seconds * calibration.factor(Mode.ASYMMETRIC)
        if asymmetric_is_slower and not must_run:
            batch, seconds = gpu_only, gpu_only_s
    running = {sequence.sequence_id for part in batch.cpu_decodes for sequence in part}
    passed_over = [sequence for sequence in decodes.host if sequence.sequence_id not in running]
    mode = Mode.ASYMMETRIC if running else Mode.GPU_ONLY
    has_work = bool(running or batch.chunks or batch.gpu_decodes)
    return Decision(batch, mode, seconds if has_work else 0.0, (*passed_over, *held_back))
