"""Iterations of decodes, captured when an epoch opens and replayed: launched at once, not kernel by kernel.

A captured iteration is everything from the embedding to the logits over static buffers (static_batch.py), of two
sub-batches with their CPU decodes where the device itself rings the doorbells. What is captured gives the same logits
as without, or is not used.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_svc.attention import AttentionBackend
from gpu_svc.batch import Batch
from gpu_svc.batch_builder import BatchBuilder
from gpu_svc.graph_capture import IterationCapture, NotCapturedError, Replay
from gpu_svc.graph_keys import GraphKey, decode_keys, mixed_keys
from gpu_svc.graph_options import GraphOptions
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.limits import Limits
from gpu_svc.static_batch import described
from gpu_svc.stopwatch import Stopwatch
from svc_common.decoder.decoder import Decoder
from svc_common.memory import size_text
from svc_common.plan import SubBatch

_LOGITS_SHARE = 4
"""Logits take at most one part of so many of the budget."""
_MOST_FAILURES = 3
"""After so many in a row the rest is not tried."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    key: GraphKey
    batches: list[Batch]
    replay: Replay


@dataclass(frozen=True, slots=True)
class Ready:
    """An iteration whose buffers are filled."""

    batches: list[Batch]
    """What it computes, to report and to tell the CPU of."""
    logits: Tensor
    """[num_outputs, vocab_size], fp32, in the plan's order, once it has run; valid until the next one runs."""
    run: Callable[[], None]


class Graphs:
    """Of one epoch."""

    def __init__(
        self,
        options: GraphOptions,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        backend: AttentionBackend,
        limits: Limits,
    ) -> None:
        """`cache` has a scratch block. Nothing is captured yet."""
        assert cache.scratch_block is not None
        self._options = options
        self._capture = options.make_capture()
        self._decoder = decoder
        self._host = host
        self._captured: list[_Captured] = []
        self._found: dict[GraphKey, _Captured | None] = {}
        most = min(
            limits.max_sequences,
            limits.max_batch_tokens,
            options.max_bytes // _LOGITS_SHARE // (4 * decoder.spec.vocab_size),
        )
        on_gpu = backend.decode_on_device is not None and cache.num_blocks > 0
        self._decode_keys = decode_keys(most) if on_gpu and most else []
        self._mixed_keys = mixed_keys(most, on_gpu) if self._reaches_cpu and most else []
        most_rows = max((key.num_rows for key in (*self._decode_keys, *self._mixed_keys)), default=0)
        longest = limits.max_sequence_tokens
        self._iteration = IterationCapture(self._capture, decoder, cache, host, backend, longest, most_rows, most)
        self._used_bytes = self._iteration.num_bytes

    @property
    def _reaches_cpu(self) -> bool:
        """With several pools the rows of a sub-batch would have to be padded for each."""
        host = self._host
        return (
            host is not None
            and len(host.pools) == 1
            and self._options.with_cpu_work
            and self._capture.repeats_host_tier(host)
        )

    @property
    def most_decodes(self) -> int:
        """On the GPU alone, that are captured."""
        return max((key.num_rows for key in self.keys if not key.has_cpu_work), default=0)

    @property
    def keys(self) -> list[GraphKey]:
        """Captured ones."""
        return [captured.key for captured in self._captured]

    # --- an iteration

    def ready(self, sub_batches: Sequence[SubBatch], builder: BatchBuilder) -> Ready | None:
        """A checked plan's, put into the buffers of the smallest graph that holds it; None where it runs eagerly."""
        key = _key_of(sub_batches)
        captured = self._find(key) if key else None
        if captured is None:
            return None
        first_rows = captured.key.gpu_rows, 0
        rows = [
            builder.decode_rows(sub_batch, index, first_rows[index])
            for index, sub_batch in enumerate(sub_batches[: len(captured.batches)])
        ]
        self._iteration.static.fill(captured.key, rows)
        num_outputs = sum(len(part.slots) for part in rows)
        batches = list(map(described, captured.batches, rows))
        return Ready(batches, self._iteration.logits[:num_outputs], captured.replay.run)

    def _find(self, key: GraphKey) -> _Captured | None:
        if key not in self._found:
            holding = (captured for captured in self._captured if captured.key.can_hold(key))
            self._found[key] = min(holding, key=lambda captured: captured.key.num_rows, default=None)
        return self._found[key]

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """What measures as a part of replays would: `run` captured, or itself where that fails."""
        run()
        try:
            return self._capture.capture(run).run
        except Exception as error:
            logger.warning("measured eagerly, its capture failed: %s: %s", type(error).__name__, error)
            return run

    # --- capture

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Within the budget, before the epoch's first plan: it writes to blocks of the host pool.

        Raises PlaneError where the host tier is lost, and what has left the CPU without an end.
        """
        if not self._decode_keys and not self._mixed_keys:
            logger.info("iterations are eager: none can be captured with this attention and this host tier")
            return
        start_s = time.perf_counter()
        budget = self._options.max_bytes
        # What is left of the first part goes to the second.
        self._capture_within(self._decode_keys, budget // 2 if self._mixed_keys else budget)
        self._capture_within(self._mixed_keys, budget)
        self._found.clear()
        logger.info(
            "%d of %d iterations of decodes captured, %d of %d with CPU work, up to %d rows; %s of %s on the device, "
            "in %.1f s%s",
            sum(not key.has_cpu_work for key in self.keys),
            len(self._decode_keys),
            sum(key.has_cpu_work for key in self.keys),
            len(self._mixed_keys),
            max((key.num_rows for key in self.keys), default=0),
            size_text(self._used_bytes),
            size_text(budget),
            time.perf_counter() - start_s,
            self._launch_text(),
        )

    def _capture_within(self, keys: Sequence[GraphKey], max_bytes: int) -> None:
        """Largest first: a smaller one lies in the memory of those before, and is all nodes, of which all have as many.

        So once one has been kept, those behind one that is too large would be, too.
        """
        kept = failures = 0
        for key in keys:
            if self._used_bytes >= max_bytes or failures == _MOST_FAILURES:
                return
            before = self._capture.free_bytes()
            try:
                replay = self._capture_one(key)
            except NotCapturedError as error:
                logger.warning("%s stays eager: %s", key, error)
                failures += 1
                continue
            failures = 0
            taken = max(0, before - self._capture.free_bytes())
            fits = self._used_bytes + taken <= max_bytes
            if fits:
                self._used_bytes += taken
                self._captured.append(_Captured(key, self._iteration.static.batches(key), replay))
                kept += 1
            elif kept:
                return
            del replay  # What is not kept gives its memory up before the next is captured.

    def _capture_one(self, key: GraphKey) -> Replay:
        """Raises NotCapturedError. Where an iteration beside the CPU does not end although the CPU lives, what it has
        raised, and later epochs don't try.
        """
        try:
            return self._iteration.capture(key)
        except NotCapturedError:
            raise
        except Exception as error:
            if not key.has_cpu_work:
                raise NotCapturedError(f"{type(error).__name__}: {error}") from error
            if self._host is not None and self._host.is_alive:
                self._options.with_cpu_work = False
            raise

    def _launch_text(self) -> str:
        """What launching kernel by kernel costs, by the smallest iteration on the GPU alone."""
        on_gpu = [captured for captured in self._captured if not captured.key.has_cpu_work]
        if not on_gpu:
            return ""
        smallest, watch = on_gpu[-1], Stopwatch(self._decoder.device)
        self._iteration.static.fill(smallest.key, ())
        eager_s = watch.least_s(partial(self._iteration.compute, smallest.key))
        replayed_s = watch.least_s(smallest.replay.run)
        layer_us = (eager_s - replayed_s) / self._decoder.spec.num_layers * 1e6
        return (
            f"; of {smallest.key.gpu_rows}: {eager_s * 1e3:.2f} ms eagerly, {replayed_s * 1e3:.2f} ms replayed, "
            f"{layer_us:.1f} us of launches a layer"
        )


def _key_of(sub_batches: Sequence[SubBatch]) -> GraphKey | None:
    """Of decodes in the first sub-batch, or in both; None of anything else."""
    with_work = [sub_batch for sub_batch in sub_batches if sub_batch.num_tokens]
    if not with_work or with_work[0] is not sub_batches[0] or any(sub_batch.prefills for sub_batch in with_work):
        return None
    return GraphKey(len(with_work[0].gpu_decodes), tuple(len(sub_batch.cpu_decodes) for sub_batch in with_work))
