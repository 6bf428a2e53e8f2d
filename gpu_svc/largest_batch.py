"""Computes as much in one iteration as the limits allow, to see how much memory that takes on the device."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from gpu_svc.epoch import Epoch
from gpu_svc.kv_cache import GpuKvCache, KvShape
from gpu_svc.limits import Limits
from gpu_svc.link import Link
from gpu_svc.recorder import NO_RECORDER
from svc_common.decoder.decoder import Decoder
from svc_common.plan import IterationPlan, IterationResult, Mode, NewSequence, PrefillChunk, Sampling, SubBatch, Tier
from svc_common.policy import ExecutionPolicy

_DEAREST = Sampling(temperature=1.0, top_p=0.9999, num_logprobs=20, num_prompt_logprobs=20)
"""Log-probabilities, and a nucleus for which all tokens may have to be sorted."""


class _OneLayerCache(GpuKvCache):
    """All layers write into one layer's memory: what lies there does not matter."""

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        super().__init__(replace(shape, num_layers=1), num_blocks, device)
        self.shape = shape

    def layer(self, layer: int) -> torch.Tensor:
        return self.blocks[0]


@torch.inference_mode()
def run_largest_batch(decoder: Decoder, shape: KvShape, limits: Limits) -> IterationResult:
    """Prompts of `limits.max_batch_tokens` tokens in all, each of which yields a token, of as many sequences as can be.

    Takes the KV of one layer beside what it is there to show.
    """
    prompts = prompt_lengths(limits)
    new, chunks, first_block = [], [], 0
    for sequence_id, num_tokens in enumerate(prompts):
        num_blocks = -(-num_tokens // shape.block_tokens)
        blocks = tuple(range(first_block, first_block + num_blocks))
        token_ids = tuple(index % decoder.spec.vocab_size for index in range(num_tokens))
        new.append(NewSequence(sequence_id, token_ids, Tier.GPU, blocks, _DEAREST))
        chunks.append(PrefillChunk(sequence_id, 0, num_tokens))
        first_block += num_blocks
    cache = _OneLayerCache(shape, first_block, decoder.device)
    epoch = Epoch(1, limits, decoder, cache, None, Link(), ExecutionPolicy(decoder.spec.num_layers))
    batch = SubBatch(prefills=tuple(chunks))
    return epoch.run(IterationPlan(1, 1, Mode.GPU_ONLY, new_sequences=tuple(new), sub_batches=(batch,)), NO_RECORDER)


def measured_bytes(decoder: Decoder, shape: KvShape, limits: Limits) -> int:
    """Peak of the largest batch on a CUDA device, as its allocator counts; what that keeps for itself is given back."""
    device = decoder.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_batch(decoder, shape, limits)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def prompt_lengths(limits: Limits) -> Iterator[int]:
    """One token for each sequence, and the rest for the first ones."""
    num_sequences = min(limits.max_sequences, limits.max_batch_tokens)
    left = limits.max_batch_tokens - num_sequences
    for _ in range(num_sequences):
        more = min(left, limits.max_sequence_tokens - 1)
        left -= more
        yield 1 + more
