"""Plans and results in a few words, for people who look for what went wrong. Tokens are counted, never shown."""

from svc_common.plan import IterationPlan, IterationResult, SubBatch


def plan_text(plan: IterationPlan | None) -> str:
    if plan is None:
        return "none"
    parts = [f"iteration {plan.iteration}, {plan.mode.value}"]
    parts += [f"sub-batch {number}: {_batch_text(batch)}" for number, batch in enumerate(plan.sub_batches)]
    if plan.cohort:
        layers = f"layers {plan.cohort.start_layer} to {plan.cohort.start_layer + plan.cohort.num_layers - 1}"
        parts.append(f"cohort of {len(plan.cohort.sequence_ids)}, {layers}")
    for name, items in (("released", plan.released), ("new", plan.new_sequences), ("swaps", plan.swaps)):
        if items:
            parts.append(f"{name} {len(items)}")
    return "; ".join([*parts, f"predicted {plan.predicted_s * 1e3:.1f} ms"])


def _batch_text(batch: SubBatch) -> str:
    num_prompt_tokens = sum(chunk.num_tokens for chunk in batch.prefills)
    return (
        f"{len(batch.prefills)} prompts with {num_prompt_tokens} tokens, "
        f"{len(batch.gpu_decodes)} decodes on the GPU, {len(batch.cpu_decodes)} on the CPU"
    )


def result_text(result: IterationResult | None) -> str:
    if result is None:
        return "none"
    if result.error is not None:
        return f"iteration {result.iteration} failed, {result.error.value}: {result.error_message}"
    timings = result.timings
    return (
        f"iteration {result.iteration}, {len(result.tokens)} tokens; took {timings.total_ns / 1e6:.1f} ms, "
        f"of it waited {timings.cpu_wait_ns / 1e6:.1f} ms for the CPU"
    )
