"""Weights in int8 and int4 against fp32 and bf16, in accuracy and in speed: `make bench-quantisation`.

Accuracy: next-token distributions over a fixed text, which ships with this project and with Python, in pieces that are
each read from their start; what fp32 computes is the truth. The default model's file has 4 bits already, which int4
keeps as they are; so int4 is also measured on a model whose weights lie on no grid: the same, each weight moved at
random by up to half a step. Speed: one pass of the model's linear part, all layers and the head, on all cores, without
attention. A decode's floor is its weights' bytes, read once at the rate of a plain sequential read in the same round.
What is compared takes turns; each figure is the median over rounds.
"""

import os
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from results import ROOT, Row, arguments, publish
from torch import Tensor

from svc_common.cpu_kernels import ThreadPool, read_ceiling
from svc_common.decoder.checkpoint import Checkpoint, FileCheckpoint, open_model
from svc_common.decoder.decoder import Decoder
from svc_common.decoder.dtypes import DTYPES
from svc_common.decoder.load import load_decoder
from svc_common.model.store import ModelFiles, resolve
from svc_common.model.tokenizer import load_tokenizer
from svc_common.model.weight_types import WeightTypeName

TYPES: tuple[WeightTypeName, ...] = ("fp32", "bf16", "int8", "int4")
OFF_GRID_TYPES: tuple[WeightTypeName, ...] = ("fp32", "int8", "int4")
PIECE_TOKENS = 512
DECODE_TOKENS = (1, 8)
PREFILL_TOKENS = 256
# Mean KL divergence in nats, and the share of equal greedy tokens.
KL_TARGETS: dict[WeightTypeName, float] = {"bf16": 0.001, "int8": 0.005, "int4": 0.005}
EQUAL_TARGETS: dict[WeightTypeName, float] = {"bf16": 0.99, "int8": 0.95, "int4": 0.95}
DECODE_TARGETS: dict[tuple[WeightTypeName, int], float] = {("int8", 1): 1.5, ("int4", 1): 1.8}


def pieces(files: ModelFiles, num_pieces: int) -> list[list[int]]:
    """Token ids: half of the pieces of this project's licence, half of Python's language reference."""
    tokenizer = load_tokenizer(files)
    topics = pydoc_data.topics.topics
    texts = [(ROOT / "LICENSE").read_text(), topics["objects"] + topics["compound"]]
    ids = [tokenizer.encode(text) for text in texts]
    starts = range(0, num_pieces // 2 * PIECE_TOKENS, PIECE_TOKENS)
    return [tokens[start : start + PIECE_TOKENS] for tokens in ids for start in starts]


def log_probabilities(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """[n, vocab_size]: of what comes after each token."""
    positions = torch.arange(len(token_ids))
    hidden, workspace = decoder.embed(torch.tensor(token_ids), positions), decoder.workspace(positions)
    for layer in range(decoder.spec.num_layers):
        decoder.pre_attention(layer, hidden, workspace)
        q, k, v = (heads.transpose(0, 1)[None] for heads in (workspace.q, workspace.kv[:, 0], workspace.kv[:, 1]))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = decoder.post_attention(layer, attended[0].transpose(0, 1).contiguous(), hidden)
    return decoder.logits(hidden).log_softmax(-1)


class OffGrid(FileCheckpoint):
    """A checkpoint whose matrices, but for embeddings, are moved off the grid of 15 steps that 32 neighbours lie on."""

    def __init__(self, checkpoint: FileCheckpoint, vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._random = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        if tensor.ndim != 2 or len(tensor) == self._vocab_size or tensor.shape[1] % 32:
            return tensor
        groups = tensor.float().view(len(tensor), -1, 32)
        steps = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        moved: Tensor = groups + (torch.rand(groups.shape, generator=self._random) - 0.5) * steps
        return moved.flatten(1)


def accuracy_rows(decoders: dict[WeightTypeName, Decoder], texts: list[list[int]], of: str = "") -> Iterator[Row]:
    """Of all but fp32. Without `of`, the model's own weights, there are targets."""
    divergences: dict[WeightTypeName, list[Tensor]] = {name: [] for name in decoders}
    equal: dict[WeightTypeName, list[Tensor]] = {name: [] for name in decoders}
    for token_ids in texts:
        truth = log_probabilities(decoders["fp32"], token_ids)
        for name, decoder in decoders.items():
            found = log_probabilities(decoder, token_ids)
            divergences[name].append((truth.exp() * (truth - found)).sum(-1))
            equal[name].append((truth.argmax(-1) == found.argmax(-1)).float())
    for name in list(decoders)[1:]:
        kl, same = torch.cat(divergences[name]), torch.cat(equal[name])
        yield Row(
            f"{name}{of}: KL divergence from fp32",
            float(kl.mean()),
            "nats per token",
            None if of else KL_TARGETS.get(name),
            at_least=False,
            detail=f"median {float(kl.median()):.2g}, p99 {float(kl.quantile(0.99)):.2g}, {len(kl)} tokens",
        )
        yield Row(
            f"{name}{of}: greedy tokens", float(same.mean()), "equal / all", None if of else EQUAL_TARGETS.get(name)
        )


def make_pass(decoder: Decoder, num_tokens: int) -> Callable[[], float]:
    """Seconds of one pass of so many tokens through all but attention."""
    spec, positions = decoder.spec, torch.arange(num_tokens)
    token_ids = torch.arange(1000, 1000 + num_tokens)
    attended = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim)

    def run() -> float:
        start = time.perf_counter()
        hidden, workspace = decoder.embed(token_ids, positions), decoder.workspace(positions)
        for layer in range(spec.num_layers):
            decoder.pre_attention(layer, hidden, workspace)
            hidden = decoder.post_attention(layer, attended, hidden)
        decoder.logits(hidden)
        return time.perf_counter() - start

    run()
    return run


def speed_rows(decoders: dict[WeightTypeName, Decoder], threads: ThreadPool, rounds: int) -> Iterator[Row]:
    memory = np.full(2**30, 0x3C, np.uint8)
    for num_tokens in (*DECODE_TOKENS, PREFILL_TOKENS):
        passes = {name: make_pass(decoder, num_tokens) for name, decoder in decoders.items()}
        repeats = 3 if num_tokens == PREFILL_TOKENS else 6
        seconds: dict[WeightTypeName, list[float]] = {name: [] for name in decoders}
        ceilings = []
        for _ in range(rounds):
            ceilings.append(read_ceiling(threads, memory, 3))
            for name, run in passes.items():
                seconds[name].append(min(run() for _ in range(repeats)))
        for name in TYPES[1:]:
            gains = [bf16_s / s for bf16_s, s in zip(seconds["bf16"], seconds[name], strict=True)]
            detail = f"{statistics.median(seconds[name]) * 1e3:.2f} ms, {decoders[name].weight_bytes / 2**20:.0f} MiB"
            if num_tokens != PREFILL_TOKENS:
                floors = [
                    decoders[name].weight_bytes / ceiling / s
                    for ceiling, s in zip(ceilings, seconds[name], strict=True)
                ]
                detail += f"; floor / pass {statistics.median(floors):.2f}"
            kind = "prefill" if num_tokens == PREFILL_TOKENS else "decode"
            yield Row(
                f"{name}: {kind} of {num_tokens}",
                statistics.median(gains),
                "speed / bf16's",
                DECODE_TARGETS.get((name, num_tokens)),
                detail=detail,
            )


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as model.source")
    parser.add_argument("--quick", action="store_true", help="less text and fewer rounds; figures are rough")
    options = parser.parse_args()
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    files = resolve(options.model)
    spec, checkpoint = open_model(files)
    assert isinstance(checkpoint, FileCheckpoint)

    def load(weights: Checkpoint, name: WeightTypeName) -> Decoder:
        return load_decoder(weights, spec, DTYPES[name], torch.device("cpu"))

    texts = pieces(files, 2 if options.quick else 8)
    decoders = {name: load(checkpoint, name) for name in TYPES}
    rows = list(accuracy_rows(decoders, texts))
    off_grid = {name: load(OffGrid(checkpoint, spec.vocab_size), name) for name in OFF_GRID_TYPES}
    rows += accuracy_rows(off_grid, texts, " off the grid")
    del off_grid
    rows += speed_rows(decoders, ThreadPool(num_threads), 3 if options.quick else 9)
    about = (
        f"{files.name}, its weights in int8 and int4 (embedding and head then int8) beside bf16, all against fp32. "
        f"Accuracy over {sum(map(len, texts))} tokens of this project's licence and Python's language reference; fp32 "
        "of the file's weights is the truth, or *off the grid* fp32 of the same moved at random by up to half a "
        "step of 15 in each 32: int4 keeps what a file has in 4 bits, other weights it has to round. Speed of all "
        f"matrix products of a pass on {num_threads} threads; floor: the weights' bytes at the read ceiling."
    )
    publish("quantisation", "Weights in int8 and int4", "make bench-quantisation", about, rows, options.publish)


if __name__ == "__main__":
    main()
