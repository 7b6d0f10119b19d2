"""Device memory by part without a profile: from a job's shape alone, for sweeps and searches.

What a pass needs most is one of a few moments: a layer's forward or backward at either end of the
stack, the loss head, the embedding, the optimizer. Each is a sum of tensors that the layers make;
the largest sum counts. tests/estimate/test_memory.py holds it to profiles of the same flags.

NOTE: what the sums are of
--------------------------
Bytes of one micro-batch on one rank, see `tensors.Sizes`: `hidden` is a [s, b, h] tensor as it
lies between tensor-parallel regions, `whole` the same gathered (equal without sequence
parallelism), `query` and `key` the rank's heads of all its tokens, `inner` its columns of the MLP.
Kernels are CUDA's: norms save their input, bias and activation are one kernel, flash attention
saves q, k, v, its output and a log-sum-exp, and adds up dq in fp32. RoPE is not fused, as in a
profile.

The swap engine has `memo_memory.LAYERS_IN_FLIGHT` layers on their way out, and as many on their
way in, or as many steps as a depth says (`in_flight`).

Of experts all tokens are taken to be routed evenly. Where layers
differ, the largest is taken to be where the peak is.

Not known here: dropout masks, learned position embeddings, multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_memo.config import MemoConfig
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.memo_memory import LAYERS_IN_FLIGHT, MemoStage, StepwiseStage
from megatron_memo.estimate.parts import Peak
from megatron_memo.estimate.stage_memory import Moment, Stage
from megatron_memo.estimate.tensors import FP32, Sizes


class _Stock(Stage):
    """Everything is kept."""

    def waiting(self) -> int:
        return round((self.in_flight - 1) * self._of_one())

    def _of_one(self) -> int:
        kept = sum(Sizes.of(self.job, number).kept for number in self.numbers)
        return kept + self.sizes.hidden

    def moments(self) -> Iterator[Moment]:
        sizes, kept = self.sizes, self.waiting() + self._of_one()
        if self.last:
            yield Moment("head forward", kept, head=self.head(None))
        yield Moment("last layer forward", kept, max(sizes.whole, sizes.spread))
        gathered = sizes.whole if self.job.sequence_parallel else 0
        # The output is not needed any more; its gradient is there, gathered, and the next one.
        backward = sizes.hidden + max(gathered + sizes.inner, 2 * sizes.dispatched)
        yield Moment("last layer backward", kept - sizes.hidden, backward)


class _FineGrained(_Stock):
    """Inputs of some modules leave; those of the last layer and of one on its way out stay."""

    def __init__(self, job: Job, stage: int, modules: Sequence[str]) -> None:
        super().__init__(job, stage)
        sizes = self.sizes
        of_module = {
            "attn_norm": sizes.hidden,
            "qkv_linear": sizes.hidden,
            "core_attn": sizes.qkv,
            "attn_proj": sizes.attended + sizes.statistics,
            "mlp_norm": sizes.hidden,
        }
        self.moved = sum(of_module[name] for name in modules)

    def _of_one(self) -> int:
        return super()._of_one() - max(self.count - 2, 0) * self.moved

    def host_bytes(self) -> int:
        return round(self.in_flight * max(self.count - self.last, 0)) * self.moved


class _FullRecompute(Stage):
    """Every layer's input is kept; one layer is computed again before its backward."""

    def waiting(self) -> int:
        return round((self.in_flight - 1) * self.count * self.sizes.hidden)

    def moments(self) -> Iterator[Moment]:
        sizes = self.sizes
        kept = self.waiting() + self.count * sizes.hidden
        attention = sizes.qkv + sizes.rotated - sizes.tables + sizes.attended
        attention += 2 * sizes.hidden + sizes.whole
        mlp = max(sizes.inner + sizes.whole, sizes.mlp) + 2 * sizes.hidden
        if sizes.mixture:
            mlp = sizes.spread + sizes.dispatched + 3 * sizes.hidden
        yield Moment("last layer forward", kept, max(attention, mlp))
        if self.last:
            yield Moment("head forward", kept + sizes.hidden, head=self.head(None))
        gathered = sizes.whole if self.job.sequence_parallel else 0
        backward = sizes.hidden + max(gathered + sizes.inner, 2 * sizes.dispatched)
        yield Moment("last layer backward", kept + sizes.kept, backward)
        # Run again, the layer's output is there too.
        again = sizes.hidden + sizes.spread if sizes.mixture else 0
        yield Moment("last layer again", kept + sizes.kept, again)


class _PaperMemo(Stage):
    """The MEMO paper's own policy: whole layers, and two rounding buffers that hold what a layer
    keeps, recomputed or brought back. Its loss head is not described: Megatron's."""

    def __init__(self, job: Job, stage: int, *, fused_head: bool) -> None:
        super().__init__(job, stage)
        self.fused_head = fused_head

    def waiting(self) -> int:
        return 0 if self.first else round(self.in_flight) * self.sizes.hidden

    def moments(self) -> Iterator[Moment]:
        sizes = self.sizes
        buffers = LAYERS_IN_FLIGHT * (sizes.always + sizes.others)
        gathered = sizes.whole if self.job.sequence_parallel else 0
        forward = sizes.whole + 2 * sizes.hidden
        yield Moment("layer forward", self.waiting(), forward, buffers=buffers)
        mlp = sizes.hidden + gathered + sizes.inner
        attention = sizes.qkv + sizes.attended + sizes.hidden + sizes.dq + 2 * sizes.expanded
        backward = max(mlp, attention)
        yield Moment("layer backward", self.waiting(), backward, buffers=buffers)
        if self.last:
            head = self.head(None)
            if self.fused_head:  # cross entropy in place, in the logits' own type
                element = self.job.element_bytes
                head = sizes.logits * element // (element + FP32) + sizes.hidden
            yield Moment("head forward", self.waiting() + sizes.hidden, head=head, buffers=buffers)


def stock(job: Job, *, stage: int | None = None) -> Peak:
    """Megatron's own layers, everything kept: the peak of a pipeline stage, or of the one that
    needs most."""
    return _most(_Stock(job, each) for each in _stages(job, stage))


def full_recompute(job: Job, *, stage: int | None = None) -> Peak:
    """--recompute-granularity full --recompute-method uniform --recompute-num-layers 1."""
    return _most(_FullRecompute(job, each) for each in _stages(job, stage))


def fine_grained(job: Job, modules: Sequence[str]) -> Peak:
    """--fine-grained-activation-offloading of --offload-modules; not held to a profile, since it
    needs Transformer Engine's layers."""
    return _most(_FineGrained(job, stage, modules) for stage in range(job.pp))


def memo(
    job: Job,
    config: MemoConfig,
    loss_chunks: int | None,
    *,
    depth: int | None = None,
    stage: int | None = None,
) -> Peak:
    """Memo's layers.

    Args:
        job: what is trained.
        config: ratio, chunks, resident layers.
        loss_chunks: of the head; None for stock's.
        depth: steps for which activations stay in flight; None for the paper's two layers.
        stage: of the pipeline; None for the one that needs most.

    Raises:
        ValueError: more chunks than tokens.
    """
    stages = _stages(job, stage)
    if depth is None:
        return _most(MemoStage(job, each, config, loss_chunks) for each in stages)
    return _most(StepwiseStage(job, each, config, loss_chunks, depth) for each in stages)


def paper_memo(job: Job, *, fused_head: bool = False) -> Peak:
    """The paper's policy, as far as the paper tells; its host memory is `strategies.paper_alpha`'s.

    Args:
        job: in 16 bits.
        fused_head: cross entropy makes no copy of the logits in fp32.
    """
    return _most(_PaperMemo(job, stage, fused_head=fused_head) for stage in range(job.pp))


def _stages(job: Job, stage: int | None) -> Sequence[int]:
    return range(job.pp) if stage is None else (stage,)


def _most(stages: Iterator[Stage]) -> Peak:
    peaks = [stage.peak() for stage in stages]
    most = max(peaks, key=lambda peak: peak.parts.total)
    return replace(most, host_bytes=max(peak.host_bytes for peak in peaks))
