"""Says in words what a policy does, what bounds it, and why others are slower."""

from planner_svc.policy.estimate import PhaseEstimate, PolicyEstimator, Prediction
from planner_svc.policy.lanes import Lane
from planner_svc.policy.search import Comparison
from svc_common.policy import PolicyKind
from svc_common.wording import as_long, counted

KIND_NAMES = {
    PolicyKind.RESIDENT: "resident",
    PolicyKind.OFFLOAD: "offloading",
    PolicyKind.PARTITION: "partition",
    PolicyKind.CPU_ONLY: "CPU-only",
}


def layer_counts(prediction: Prediction, num_layers: int, *, of_decode: bool) -> tuple[int, int, int]:
    """A phase's layers: on the CPU, streamed and resident."""
    cpu_layers = prediction.decode.cpu_layers if of_decode else prediction.prefill.cpu_layers
    resident = min(prediction.policy.resident_layers, num_layers - cpu_layers)
    return cpu_layers, num_layers - cpu_layers - resident, resident


def layers_text(prediction: Prediction, num_layers: int, *, of_decode: bool) -> str:
    """In words: "20 CPU, 2 streamed, 26 resident"."""
    counts = layer_counts(prediction, num_layers, of_decode=of_decode)
    parts = zip(counts, ("CPU", "streamed", "resident"), strict=True)
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def reasons(estimator: PolicyEstimator, comparison: Comparison) -> list[str]:
    """A sentence for each phase of the best, and one for each other pair of kinds."""
    best, num_layers = comparison.best, estimator.model.num_layers
    found = [
        f"Prefill by {_phase_text(best.prefill, layers_text(best, num_layers, of_decode=False))}",
        f"Decode by {_phase_text(best.decode, layers_text(best, num_layers, of_decode=True))}",
    ]
    if best.memory.num_host_sequences:
        found.append(
            f"The GPU has room for the KV of {best.mix.num_sequences - best.memory.num_host_sequences} of "
            f"{counted(best.mix.num_sequences, 'sequence')}; the CPU attends for "
            f"{'the other' if best.memory.num_host_sequences == 1 else 'the others'} beside it."
        )
    return found + [_against(best, other) for other in comparison.by_kind[1:]]


def pair_text(prediction: Prediction) -> str:
    """The kinds of both phases, or the one of both."""
    prefill, decode = (KIND_NAMES[kind] for kind in prediction.kinds)
    return prefill if prefill == decode else f"{prefill} / {decode}"


def _phase_text(phase: PhaseEstimate, layers: str) -> str:
    groups = "two groups in flight, " if phase.num_groups == 2 else ""
    return f"{KIND_NAMES[phase.kind]} ({layers}): {groups}{_bound_text(phase)}."


def _bound_text(phase: PhaseEstimate) -> str:
    """The busiest lane, and the next."""
    first, second = sorted(phase.busy_s, key=lambda lane: phase.busy_s[lane], reverse=True)[:2]
    text = f"{_name(first)} works {_ms(phase.busy_s[first])} of {_ms(phase.iteration_s)} an iteration"
    if phase.busy_s[second] > 0:
        text += f", {_name(second)} {_ms(phase.busy_s[second])}"
    return text


def _against(best: Prediction, other: Prediction) -> str:
    """Whichever phase loses more says why."""
    lost = {True: other.decode.total_s - best.decode.total_s, False: other.prefill.total_s - best.prefill.total_s}
    of_decode = lost[True] >= lost[False]
    phase = other.decode if of_decode else other.prefill
    longer = as_long(other.total_s / best.total_s)
    return f"{pair_text(other)} takes {longer}: in {'decode' if of_decode else 'prefill'} {_bound_text(phase)}."


def _name(lane: Lane) -> str:
    return f"the {lane.value}"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
