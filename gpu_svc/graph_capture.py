"""Captures single iterations of decodes over static buffers, and makes sure that a replay gives the same logits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from gpu_svc.attention import AttentionBackend
from gpu_svc.cpu_program import CpuProgram
from gpu_svc.graph_keys import GraphKey
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.pipeline import Stage, run_layers
from gpu_svc.static_batch import StaticBatches
from svc_common.decoder.decoder import Decoder
from svc_common.policy import ExecutionPolicy

_ALL_ON_GPU = ExecutionPolicy(resident_layers=0)
_MOST_APART = 0.02
"""Of the largest logit: the same kernels may add up in another order, in 16 bits."""


class Replay(Protocol):
    def run(self) -> None:
        """Launches all that was captured, over what its buffers hold by then."""
        ...


class Capture(Protocol):
    """How a device captures; of one epoch."""

    def repeats_host_tier(self, host: HostTier) -> bool:
        """Whether a replay does what `submit` and `wait` of this tier were told."""
        ...

    def capture(self, run: Callable[[], None]) -> Replay:
        """What `run` launches, without its being done. It has run before. Raises what `run` or the device raises."""
        ...

    def free_bytes(self) -> int:
        """Of the device's memory, in which captured graphs take their part."""
        ...


class NotCapturedError(Exception):
    """The text says why."""


class IterationCapture:
    """Of one epoch, before its first plan."""

    def __init__(
        self,
        capture: Capture,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        backend: AttentionBackend,
        longest: int,
        most_rows: int,
        most_outputs: int,
    ) -> None:
        """`cache` has a scratch block. `longest` context in tokens, `most_rows` of a key, `most_outputs` of a plan."""
        assert cache.scratch_block is not None
        self._capture = capture
        self._decoder = decoder
        self._cache = cache
        self._host = host
        self._attend = backend.decode_on_device
        self._longest = longest
        host_blocks = host.num_blocks if host else 0
        self.static = StaticBatches(cache.shape, decoder.device, cache.scratch_block, host_blocks, most_rows, longest)
        shape = min(most_rows, most_outputs), decoder.spec.vocab_size
        self.logits = torch.empty(shape, dtype=torch.float32, device=decoder.device)
        """[rows that may yield a token, vocab_size]: those of the iteration that has run last, in the plan's order."""

    @property
    def num_bytes(self) -> int:
        """Of buffers on the device."""
        return self.static.num_bytes + self.logits.nbytes + self._cache.blocks[:, 0].nbytes

    def compute(self, key: GraphKey) -> None:
        """An iteration over the buffers; all other tensors of it are gone when it ends."""
        batches = self.static.batches(key)
        if key.gpu_rows:
            assert self._attend is not None
            batches[0] = replace(batches[0], gpu_decode=self._attend(*self.static.lengths(key), self._longest))
        stages = [Stage(batch, self._decoder, self._cache, self._host) for batch in batches]
        first, second = [*stages, None][:2]
        assert first is not None
        run_layers(first, second, self._decoder.spec.num_layers)
        hidden = torch.cat([stage.hidden for stage in stages])
        output_rows = self.static.output_rows(key)[: len(self.logits)]
        self.logits[: len(output_rows)].copy_(self._decoder.logits(hidden[output_rows]))

    def capture(self, key: GraphKey) -> Replay:
        """Raises NotCapturedError; PlaneError where the host tier is lost, and what has left it without an end."""
        self.static.fill(key, ())
        run, logits = partial(self.compute, key), self.logits[: key.num_rows]
        self._beside_cpu(key, run)
        expected = logits.clone()
        try:
            # The CPU knows of nothing yet, so that what cannot be captured harms nothing.
            replay = self._capture.capture(run)
        except Exception as error:
            # The end of a capture that was broken off complains of that; what broke it was raised before.
            first = error.__context__ or error
            raise NotCapturedError(f"{type(first).__name__}: {first}") from error
        logits.zero_()
        if key.has_cpu_work:
            replay = self._capture_beside_cpu(key, run)
        else:
            replay.run()
        scale = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max())
        if not torch.allclose(logits, expected, rtol=0.0, atol=_MOST_APART * scale, equal_nan=True):
            raise NotCapturedError("its replay computes other logits")
        return replay

    def _capture_beside_cpu(self, key: GraphKey, run: Callable[[], None]) -> Replay:
        """Captured anew once the CPU expects it, for doorbells count from an iteration's begin; and replayed."""
        replays: list[Replay] = []

        def capture_and_replay() -> None:
            replays.append(self._capture.capture(run))
            replays[0].run()

        self._beside_cpu(key, capture_and_replay)
        return replays[0]

    def _beside_cpu(self, key: GraphKey, run: Callable[[], None]) -> None:
        """As an iteration: the CPU is told of it before and reports after."""
        if not key.has_cpu_work:
            run()
            return
        assert self._host is not None
        program = CpuProgram.of(self.static.batches(key), _ALL_ON_GPU, self._decoder.spec.num_layers)
        self._host.begin(program.cpu_work, [0])
        run()
        self._host.finish()
