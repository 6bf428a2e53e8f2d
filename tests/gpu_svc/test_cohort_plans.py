"""Plans that break the rules of a cohort's steps, or of their mode, are refused before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
from support.gpu import LIMITS, Driver, load_decoder

from gpu_svc.limits import Limits
from svc_common.model.store import ModelFiles
from svc_common.plan import (
    CohortStep,
    ExecutionError,
    Mode,
    NewBlocks,
    NewSequence,
    PrefillChunk,
    SubBatch,
    Swap,
    Tier,
)

COHORT_23 = (2, 3)
# By name: message, sub-batches, changes. Sequences 2 and 3 can decode on the host, 1 on the GPU; 4 has half its prompt.
BEFORE_A_STEP: dict[str, tuple[str, tuple[SubBatch, ...], dict[str, Any]]] = {
    "no sequences": ("a cohort has no sequences", (), {"cohort": CohortStep((), 0, 1)}),
    "an unknown sequence": ("sequence 9 is not known", (), {"cohort": CohortStep((2, 9), 0, 1)}),
    "a sequence on the GPU": ("on the host, where it is not", (), {"cohort": CohortStep((2, 1), 0, 1)}),
    "half a prompt": ("4 decodes before its prompt is computed", (), {"cohort": CohortStep((4,), 0, 1)}),
    "no room for a token": ("6 blocks, too few for 25 tokens", (), {"cohort": CohortStep((5,), 0, 1)}),
    "a sequence twice": ("2 appears twice in the cohort", (), {"cohort": CohortStep((2, 3, 2), 0, 1)}),
    "more sequences than an iteration has tokens": (
        "5 tokens in an iteration; at most 4",
        (),
        {"cohort": CohortStep((1, 2, 3, 4, 5), 0, 1)},
    ),
    "a prompt that is prefilled": (
        "sequence 4 is in a sub-batch while its cohort's step runs",
        (SubBatch(prefills=(PrefillChunk(4, 2, 2),)),),
        {"cohort": CohortStep((4,), 0, 1)},
    ),
    "no layer": ("0 layers from layer 0 on; at least 1", (), {"cohort": CohortStep(COHORT_23, 0, 0)}),
    "layers backwards": ("-1 layers from layer 0 on", (), {"cohort": CohortStep(COHORT_23, 0, -1)}),
    "a layer too many": ("4 layers from layer 0 on", (), {"cohort": CohortStep(COHORT_23, 0, 4)}),
    "before the first layer": ("2 layers from layer -1 on", (), {"cohort": CohortStep(COHORT_23, -1, 2)}),
    "a beginning amid the model": ("begins at layer 1, its step is at 0", (), {"cohort": CohortStep(COHORT_23, 1, 1)}),
    "two sub-batches": (
        "a decoupled iteration has 2 sub-batches; at most one",
        (SubBatch(gpu_decodes=(1,)), SubBatch()),
        {"cohort": CohortStep(COHORT_23, 0, 1)},
    ),
    "CPU decodes": (
        "a sub-batch of a decoupled iteration holds CPU decodes",
        (SubBatch(cpu_decodes=(2,)),),
        {"cohort": CohortStep((3,), 0, 1)},
    ),
    "no cohort": ("a decoupled iteration without a cohort", (SubBatch(gpu_decodes=(1,)),), {"mode": Mode.DECOUPLED}),
    "another mode": (
        "a same_layer iteration with a cohort",
        (SubBatch(gpu_decodes=(1,)),),
        {"mode": Mode.SAME_LAYER, "cohort": CohortStep(COHORT_23, 0, 1)},
    ),
    "two sub-batches in the same layer": (
        "a same_layer iteration has 2 sub-batches; at most one",
        (SubBatch(gpu_decodes=(1,)), SubBatch(cpu_decodes=(2,))),
        {"mode": Mode.SAME_LAYER},
    ),
}
# After the first of three layers of a step of sequences 2 and 3.
AMID_A_STEP: dict[str, tuple[str, tuple[SubBatch, ...], dict[str, Any]]] = {
    "a layer again": ("begins at layer 0, its step is at 1", (), {"cohort": CohortStep(COHORT_23, 0, 1)}),
    "a gap": ("begins at layer 2, its step is at 1", (), {"cohort": CohortStep(COHORT_23, 2, 1)}),
    "beyond the last layer": ("3 layers from layer 1 on", (), {"cohort": CohortStep(COHORT_23, 1, 3)}),
    "one less": ("goes on with sequences [2], it began with [2, 3]", (), {"cohort": CohortStep((2,), 1, 1)}),
    "another order": ("goes on with sequences [3, 2]", (), {"cohort": CohortStep((3, 2), 1, 1)}),
    "a member released": (
        "sequence 3 is released while its cohort's step runs",
        (),
        {"released": (1, 3), "cohort": CohortStep(COHORT_23, 1, 1)},
    ),
    "a member moved": (
        "sequence 2 moves while its cohort's step runs",
        (),
        {"swaps": (Swap(2, Tier.GPU, tuple(range(20, 30))),), "cohort": CohortStep(COHORT_23, 1, 1)},
    ),
    "new blocks for a member": (
        "sequence 2 gets blocks while its cohort's step runs",
        (),
        {"new_blocks": (NewBlocks(2, (0,)),), "cohort": CohortStep(COHORT_23, 1, 1)},
    ),
    "a member released by a plan that only releases": ("sequence 2 is released", (), {"released": (2,)}),
    "a member decoded by itself": (
        "sequence 3 is in a sub-batch while its cohort's step runs",
        (SubBatch(gpu_decodes=(1,), cpu_decodes=(3,)),),
        {},
    ),
}
INVALID = [
    *((f"before: {name}", False, *case) for name, case in BEFORE_A_STEP.items()),
    *((f"amid: {name}", True, *case) for name, case in AMID_A_STEP.items()),
]


@pytest.mark.parametrize(("_name", "amid", "message", "sub_batches", "changes"), INVALID, ids=[c[0] for c in INVALID])
def test_invalid_plans_end_the_epoch(
    _name: str,
    amid: bool,
    message: str,
    sub_batches: tuple[SubBatch, ...],
    changes: dict[str, Any],
    checkpoint: Callable[[str], ModelFiles],
    make_driver: Callable[..., Driver],
    cpu_attention: Any,
) -> None:
    limits = Limits(LIMITS.max_sequences, 4, LIMITS.max_sequence_tokens)
    driver = make_driver(load_decoder(checkpoint("llama")), 40, cpu_attention, limits=limits)
    for sequence_id, tier in {1: Tier.GPU, 2: Tier.HOST, 3: Tier.HOST}.items():
        driver.prefill(sequence_id, [5, 6, 7], tier, chunk_tokens=4, room_tokens=20)
    half = NewSequence(4, (1, 2, 3, 4), Tier.HOST, tuple(driver.blocks(Tier.HOST, 8)))
    driver.run(SubBatch(prefills=(PrefillChunk(4, 0, 2),)), new_sequences=(half,))
    driver.prefill(5, list(range(24)), Tier.HOST, chunk_tokens=4, room_tokens=0)
    if amid:
        driver.run(cohort=CohortStep(COHORT_23, 0, 1))
    result = driver.try_run(*sub_batches, **changes)
    assert result.error is ExecutionError.INVALID_PLAN
    assert message in result.error_message
    assert result.tokens == ()
    assert driver.try_run().error is ExecutionError.STALE
