"""Checks the sampling options of a request and resolves their defaults."""

import secrets
from itertools import islice

from neoflex.v1 import inference_pb2 as pb
from planner_svc.violations import Violations
from svc_common.plan import Sampling

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
_GREEDY_BELOW = 1e-4
"""Temperatures under this divide logits to infinity in 16 bits, while the draw has long been certain."""


def check_sampling(options: pb.SamplingOptions, vocab_size: int, bad: Violations) -> None:
    """Whether all are within their limits. Comparisons with NaN are false, so NaN is refused by each of these."""
    if options.HasField("temperature"):
        value = options.temperature
        bad.require(
            0 <= value <= MAX_TEMPERATURE,
            "request.sampling.temperature",
            f"must be in [0, {MAX_TEMPERATURE:g}], is {value:g}",
        )
    bad.require(options.top_k >= 0, "request.sampling.top_k", f"must be at least 0, is {options.top_k}")
    if options.HasField("top_p"):
        bad.require(0 < options.top_p <= 1, "request.sampling.top_p", f"must be in (0, 1], is {options.top_p:g}")
    bad.require(0 <= options.min_p <= 1, "request.sampling.min_p", f"must be in [0, 1], is {options.min_p:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(options, name)
        bad.require(
            -MAX_PENALTY <= penalty <= MAX_PENALTY,
            f"request.sampling.{name}",
            f"must be in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}], is {penalty:g}",
        )
    if options.HasField("repetition_penalty"):
        bad.require(
            0 < options.repetition_penalty <= MAX_PENALTY,
            "request.sampling.repetition_penalty",
            f"must be in (0, {MAX_PENALTY:g}], is {options.repetition_penalty:g}",
        )
    _check_logit_bias(options, vocab_size, bad)


def _check_logit_bias(options: pb.SamplingOptions, vocab_size: int, bad: Violations) -> None:
    num_tokens = len(options.logit_bias)
    bad.require(
        num_tokens <= MAX_BIASED_TOKENS,
        "request.sampling.logit_bias",
        f"must be of at most {MAX_BIASED_TOKENS} tokens, is of {num_tokens}",
    )
    for token_id, bias in islice(options.logit_bias.items(), MAX_BIASED_TOKENS):
        field = f"request.sampling.logit_bias[{token_id}]"
        bad.require(0 <= token_id < vocab_size, field, f"its token must be in [0, {vocab_size})")
        bad.require(
            -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS,
            field,
            f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], is {bias:g}",
        )


def resolve_sampling(options: pb.SamplingOptions, num_logprobs: int, num_prompt_logprobs: int) -> Sampling:
    """Checked options with every default; the grammar is still to be added."""
    temperature = options.temperature if options.HasField("temperature") else 1.0
    return Sampling(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed if options.HasField("seed") else secrets.randbits(63),
        num_logprobs=num_logprobs,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty if options.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted((token_id, bias) for token_id, bias in options.logit_bias.items() if bias)),
        num_prompt_logprobs=num_prompt_logprobs,
    )
