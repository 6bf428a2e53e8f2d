"""The reference nobody here wrote: transformers' own greedy decoding, in fp32, from the same file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from svc_common.model.store import ModelFiles

TIE = 1e-3
"""Two best logits this close may be told apart either way by a different order of additions."""


@dataclass
class Verdict:
    """What a comparison found."""

    steps: int = 0
    near_ties: list[str] = field(default_factory=list)
    """Steps that took the other one of two nearly equal logits."""
    mismatches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.steps} steps equal, {len(self.near_ties)} near ties {self.near_ties}, wrong {self.mismatches}"


class Reference:
    """Greedy tokens of a model, and a judge of other implementations' tokens."""

    def __init__(self, files: ModelFiles, model: PreTrainedModel | None = None, tie: float = TIE) -> None:
        """`model`: in place of what transformers makes of the files."""
        self._tie = tie
        # Threads of a second process on the same few cores wait for one another most of the time.
        torch.set_num_threads(1)
        self._model = model or load_transformers(files)
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The `num_tokens` greedy tokens after `prompt`, end tokens not special. Computed once per prompt."""
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            output = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._greedy[key] = output[0, len(prompt) :].tolist()
        return self._greedy[key]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, vocab_size]: after each token."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return logits

    @torch.inference_mode()
    def judge(self, prompt: Sequence[int], tokens: Sequence[int], verdict: Verdict, label: str = "") -> None:
        """Adds to `verdict` how each of `tokens` compares with the reference's choice after the same prefix."""
        verdict.steps += len(tokens)
        if self.greedy(prompt, len(tokens)) == list(tokens):
            return
        logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for step, token in enumerate(tokens):
            if token == best.indices[step, 0]:
                continue
            gap = float(best.values[step, 0] - logits[step, token])
            text = f"{label} step {step}: {token} for {int(best.indices[step, 0])}, {gap:.2e} apart"
            (verdict.near_ties if gap <= self._tie else verdict.mismatches).append(text)


@cache
def load_transformers(files: ModelFiles) -> PreTrainedModel:
    """The model as transformers loads it, in fp32."""
    gguf = {"gguf_file": files.gguf.name} if files.gguf else {}
    return AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, **gguf).eval()
