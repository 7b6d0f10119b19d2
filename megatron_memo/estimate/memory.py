"""Device memory by part without a profile: from a job's shape alone, for sweeps and searches.

What a pass needs most is one of a few moments: a layer's forward or backward at either end of the
stack, the loss head, the embedding, the optimizer. Each is a sum of tensors that the layers make;
the largest sum counts. tests/estimate/test_memory.py holds it to profiles of the same flags.

NOTE: what the sums are of
--------------------------
Bytes of one micro-batch on one rank, see `Sizes`: `hidden` is a [s, b, h] tensor as it lies between
tensor-parallel regions, `whole` the same gathered (equal without sequence parallelism), `query` and
`key` the rank's heads of all its tokens, `inner` its columns of the MLP. Kernels are CUDA's: norms
save their input, bias and activation are one kernel, flash attention saves q, k, v, its output and
a log-sum-exp, and adds up dq in fp32. RoPE is not fused, as in a profile.

The swap engine has `LAYERS_IN_FLIGHT` layers on their way out, and as many on their way in.

Not known here: dropout masks, learned position embeddings, multi-token prediction. Of experts all
tokens are taken to be routed evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_memo.config import MemoConfig
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Parts, Peak
from megatron_memo.layer.chunks import Fate, plan_chunks

FP32 = 4
LAYERS_IN_FLIGHT = 2  # see swap.engine
_CUBLAS = 32 << 20  # see ops.workspace.cublas


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank; see the module's NOTE.

    Attributes:
        tables: cosines and sines that a layer saves with its rotated q and k.
        activation_input: of the MLP's activation: `inner`, twice that with a gate.
        statistics: the attention's log-sum-exp.
        dq: fp32 accumulator of flash attention's backward.
        expanded: what grouped k and v take more when every query head has its own.
        logits: of the whole sequence with what cross entropy makes of them.
    """

    hidden: int
    whole: int
    query: int
    key: int
    inner: int
    activation_input: int
    statistics: int
    tables: int
    dq: int
    expanded: int
    logits: int

    @classmethod
    def of(cls, job: Job, layer: int) -> Sizes:
        """Those of a layer, from 1."""
        element, tokens = job.element_bytes, job.tokens
        heads, groups = job.heads // job.tp, max(job.groups // job.tp, 1)
        ffn = job.ffn
        if job.has_experts(layer):
            assert job.experts is not None
            ffn = job.experts.topk * job.experts.ffn + job.experts.shared_ffn
        query, key = (tokens * n * job.head_dim * element for n in (heads, groups))
        inner = tokens * ffn * element // job.tp
        table = job.sequence // job.cp * job.head_dim * element
        widths = job.vocabulary // job.tp * tokens
        return cls(
            hidden=job.local_tokens * job.hidden * element,
            whole=tokens * job.hidden * element,
            query=query,
            key=key,
            inner=inner,
            activation_input=inner * (2 if job.gated else 1),
            statistics=tokens * heads * FP32,
            tables=4 * table if job.rope else 0,
            dq=tokens * heads * -(-job.head_dim // 32) * 32 * FP32,
            expanded=2 * (query - key),
            logits=widths * (FP32 + (element if element < FP32 else 0)),
        )

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.key

    @property
    def rotated(self) -> int:
        """Rotated q and k with the tables, beside the projection's output."""
        return self.query + self.key + self.tables if self.tables else 0

    @property
    def always(self) -> int:
        """What a swapping layer moves whatever the ratio is: input, attention output."""
        return self.hidden + self.query + self.statistics

    @property
    def others(self) -> int:
        """What the ratio is a fraction of: two norms' outputs, q, k, v, residual, MLP."""
        return 3 * self.hidden + self.qkv + self.tables + self.mlp

    @property
    def mlp(self) -> int:
        """The activation's input and output."""
        return self.activation_input + self.inner

    @property
    def kept(self) -> int:
        """What Megatron's own layer keeps: two norms' outputs, two residuals (the second is its
        output), q, k, v before and after RoPE, attention output, MLP."""
        attention = self.qkv + self.rotated + self.query + self.statistics
        return 4 * self.hidden + attention + self.mlp


@dataclass(frozen=True)
class _Moment:
    where: str
    skeletals: int
    transients: int = 0
    head: int = 0
    buffers: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.skeletals + self.transients + self.head + self.buffers + self.optimizer


class _Stage:
    """One pipeline stage of a job; subclasses know how layers treat their activations."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage = job, stage
        self.numbers = [n for v in range(job.virtual) for n in job.layers_of(stage, v)]
        self.count = len(self.numbers)
        # Layers may differ where some have experts; the largest stands for all.
        self.sizes = max(
            (Sizes.of(job, n) for n in self.numbers or [1]), key=lambda sizes: sizes.kept
        )
        self.first, self.last = stage == 0, stage == job.pp - 1

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations wait for backward, in those of the whole stage."""
        job = self.job
        if job.virtual == 1:
            return min(job.pp - self.stage, job.micro_batches)
        chunks = 2 * (job.pp - self.stage - 1) + (job.virtual - 1) * job.pp + 1
        return min(chunks / job.virtual, job.micro_batches)

    def peak(self) -> Peak:
        most = max(self._all_moments(), key=lambda moment: moment.total)
        held = self._held()
        parts = Parts(
            weights=held["weights"],
            gradients=held["gradients"],
            optimizer=held["optimizer"] + most.optimizer,
            skeletals=most.skeletals,
            transients=most.transients,
            head=most.head,
            buffers=held["buffers"] + most.buffers,
        )
        return Peak(parts, most.where, self.host_bytes(), self.stage, sum(held.values()))

    def _held(self) -> dict[str, int]:
        job = self.job
        parameters = job.parameters(self.stage)
        master = FP32 if job.element_bytes < FP32 else 0  # fp32 weights are their own masters
        share = job.dp * job.cp if job.distributed_optimizer else 1
        table = job.sequence * job.head_dim * FP32 if job.rope else 0
        # What a stage received and sent last is referred to until the next takes its place.
        between = 0 if self.first else 3 * self.sizes.hidden
        return {
            "weights": parameters * job.element_bytes,
            # Added up in fp32 where they are exchanged in it.
            "gradients": parameters * job.gradient_bytes,
            "optimizer": parameters * (master + 2 * FP32) // share,
            "buffers": self.gather_buffer() + table + self.table_rows() + between + _CUBLAS,
        }

    def _all_moments(self) -> Iterator[_Moment]:
        yield from self.moments()
        sizes, job = self.sizes, self.job
        if self.first:
            waiting = self.waiting()
            if job.sequence_parallel:
                yield _Moment("embedding backward", waiting, 2 * sizes.whole)
                yield _Moment("embedding forward", waiting, sizes.whole + sizes.hidden)
            else:
                yield _Moment("embedding backward", waiting, 2 * sizes.hidden)
        # Torch's Adam works in two temporaries of the largest weight.
        largest = max(job.vocabulary if self.first or self.last else 0, job.ffn)
        share = job.dp * job.cp if job.distributed_optimizer else 1
        update = 2 * largest * job.hidden // job.tp * FP32 // share
        yield _Moment("update", 0, optimizer=update)

    # ---- for subclasses

    def moments(self) -> Iterator[_Moment]:
        """Candidates for the peak."""
        raise NotImplementedError

    def waiting(self) -> int:
        """Bytes of other micro-batches, while one is at work."""
        raise NotImplementedError

    def gather_buffer(self) -> int:
        """Megatron's own, in which it gathers what sequence parallelism has split."""
        return self.sizes.whole if self.job.sequence_parallel else 0

    def table_rows(self) -> int:
        """Copies of the rows of the RoPE table."""
        return 0

    def host_bytes(self) -> int:
        return 0

    def head(self, chunks: int | None) -> int:
        """Logits, the final norm's output and the loss's small tensors."""
        return self.sizes.logits // (chunks or 1) + self.sizes.hidden


class _Stock(_Stage):
    """Everything is kept."""

    def waiting(self) -> int:
        return round((self.in_flight - 1) * self._of_one())

    def _of_one(self) -> int:
        return self.count * self.sizes.kept + self.sizes.hidden

    def moments(self) -> Iterator[_Moment]:
        sizes, kept = self.sizes, self.waiting() + self._of_one()
        if self.last:
            yield _Moment("head forward", kept, head=self.head(None))
        yield _Moment("last layer forward", kept, sizes.whole)
        gathered = sizes.whole if self.job.sequence_parallel else 0
        # The output is not needed any more; its gradient is there, gathered, and the next one.
        backward = sizes.hidden + gathered + sizes.inner
        yield _Moment("last layer backward", kept - sizes.hidden, backward)


class _FineGrained(_Stock):
    """Inputs of some modules leave; those of the last layer and of one on its way out stay."""

    def __init__(self, job: Job, stage: int, modules: Sequence[str]) -> None:
        super().__init__(job, stage)
        sizes = self.sizes
        of_module = {
            "attn_norm": sizes.hidden,
            "qkv_linear": sizes.hidden,
            "core_attn": sizes.qkv,
            "attn_proj": sizes.query + sizes.statistics,
            "mlp_norm": sizes.hidden,
        }
        self.moved = sum(of_module[name] for name in modules)

    def _of_one(self) -> int:
        return super()._of_one() - max(self.count - 2, 0) * self.moved

    def host_bytes(self) -> int:
        return round(self.in_flight * max(self.count - self.last, 0)) * self.moved


class _FullRecompute(_Stage):
    """Every layer's input is kept; one layer is computed again before its backward."""

    def waiting(self) -> int:
        return round((self.in_flight - 1) * self.count * self.sizes.hidden)

    def moments(self) -> Iterator[_Moment]:
        sizes = self.sizes
        kept = self.waiting() + self.count * sizes.hidden
        attention = sizes.qkv + sizes.rotated - sizes.tables + sizes.query
        attention += 2 * sizes.hidden + sizes.whole
        mlp = max(sizes.inner + sizes.whole, sizes.mlp) + 2 * sizes.hidden
        yield _Moment("last layer forward", kept, max(attention, mlp))
        if self.last:
            yield _Moment("head forward", kept + sizes.hidden, head=self.head(None))
        gathered = sizes.whole if self.job.sequence_parallel else 0
        backward = sizes.hidden + gathered + sizes.inner
        yield _Moment("last layer backward", kept + sizes.kept, backward)


class _Memo(_Stage):
    """Token chunks are swapped or recomputed; a few layers are in flight."""

    def __init__(self, job: Job, stage: int, memo: MemoConfig, loss_chunks: int | None) -> None:
        super().__init__(job, stage)
        self.loss_chunks = loss_chunks
        shared = job.tp if job.sequence_parallel else 1
        rows = job.sequence // job.cp // shared
        chunks = plan_chunks(memo, rows, shared, keep=False)
        self.largest = max(chunk.stop - chunk.start for chunk in chunks) / rows
        swapped = [c.stop - c.start for c in chunks if c.fate is Fate.SWAP]
        self.alpha = sum(swapped) / rows
        self.whole_chunk = len(chunks) == 1
        first_resident = job.layers - memo.resident_layers
        self.resident = sum(1 for number in self.numbers if number > first_resident)
        self.swapping = self.count - self.resident

    @property
    def buffer(self) -> int:
        """A swapped layer's bytes, on their way out or back."""
        return self.sizes.always + round(self.alpha * self.sizes.others)

    @property
    def of_resident(self) -> int:
        # A chunk's rows of the attention output are copied out of it and saved.
        copied = 0 if self.whole_chunk else self.sizes.query
        return self.sizes.always + self.sizes.others + copied

    def host_bytes(self) -> int:
        return round(self.in_flight * self.swapping) * self.buffer

    def gather_buffer(self) -> int:
        return round(super().gather_buffer() * self.largest)

    def table_rows(self) -> int:
        # A chunk's rows lie apart where ranks share the tokens; all layers share the copies.
        apart = self.job.sequence_parallel and not self.whole_chunk and self.job.rope
        return self.job.sequence // self.job.cp * self.job.head_dim * FP32 if apart else 0

    def waiting(self) -> int:
        # A schedule keeps what a stage received until its backward.
        return 0 if self.first else round(self.in_flight) * self.sizes.hidden

    def _in_flight_forward(self) -> int:
        """Layers whose tensors are still on the device, the one at work with them."""
        resident = min(self.resident, self.count)
        others = min(LAYERS_IN_FLIGHT - min(resident, LAYERS_IN_FLIGHT), self.swapping)
        return resident * self.of_resident + others * self.buffer

    def moments(self) -> Iterator[_Moment]:
        sizes = self.sizes
        waiting = self.waiting()
        held = waiting + self._in_flight_forward()
        # The embedding's output is referred to as long as forward runs.
        entry = sizes.hidden if self.first else 0
        yield _Moment("last layer forward", held + entry, self._forward_work())
        if self.last:
            hidden = 2 * sizes.hidden  # the last layer's output; the head's gradient of it
            yield _Moment("head backward", held + hidden, head=self.head(self.loss_chunks))
        yield from self._backward(waiting)

    def _forward_work(self) -> int:
        """Of the last chunk of a layer, or of attention."""
        sizes, largest = self.sizes, self.largest
        chunk = largest * (sizes.whole + 2 * sizes.hidden)
        if self.alpha < 1:
            chunk += largest * (sizes.inner + 2 * sizes.hidden)
        post = sizes.hidden + round(chunk)
        # Attention makes its output twice over, by heads and by tokens; the MLP's part of what
        # the layer swaps isn't there yet.
        attention = sizes.qkv + sizes.query + sizes.expanded
        attention -= round(self.alpha * (sizes.mlp + 2 * sizes.hidden))
        return max(post, attention)

    def _backward(self, waiting: int) -> Iterator[_Moment]:
        sizes, job = self.sizes, self.job
        gathered = sizes.whole if job.sequence_parallel else 0
        first_chunk = sizes.hidden + round(self.largest * (gathered + sizes.inner))
        if self.resident >= LAYERS_IN_FLIGHT:
            coming = self.buffer if self.swapping else 0
            kept = waiting + self.resident * self.of_resident
            yield _Moment("last layer backward", kept, first_chunk, buffers=coming)
        elif self.resident:
            kept = waiting + self._in_flight_forward()
            yield _Moment("last layer backward", kept, first_chunk)
        if not self.swapping:
            return
        buffers = min(self.swapping, LAYERS_IN_FLIGHT) * self.buffer
        if job.pp > 1 and not self.last and job.micro_batches > 1:
            # The micro-batch that went forward last has not been retired yet.
            waiting += self.buffer + sizes.hidden
        # q, k, v put together again; gradients of them, of the output and of the residual.
        again = 1 - self.alpha
        attention = 2 * sizes.qkv + sizes.query + sizes.hidden + sizes.dq + 2 * sizes.expanded
        attention += round(again * (sizes.hidden + sizes.tables))
        yield _Moment("attention backward", waiting, attention, buffers=buffers)
        work = sizes.whole + sizes.inner
        if again:
            work += sizes.mlp + 3 * sizes.hidden
        post = 2 * sizes.hidden + sizes.query + round(self.largest * work)
        yield _Moment("MLP backward", waiting, post, buffers=buffers)


class _PaperMemo(_Stage):
    """The MEMO paper's own policy: whole layers, and two rounding buffers that hold what a layer
    keeps, recomputed or brought back. Its loss head is not described: Megatron's."""

    def __init__(self, job: Job, stage: int, *, fused_head: bool) -> None:
        super().__init__(job, stage)
        self.fused_head = fused_head

    def waiting(self) -> int:
        return 0 if self.first else round(self.in_flight) * self.sizes.hidden

    def moments(self) -> Iterator[_Moment]:
        sizes = self.sizes
        buffers = LAYERS_IN_FLIGHT * (sizes.always + sizes.others)
        gathered = sizes.whole if self.job.sequence_parallel else 0
        forward = sizes.whole + 2 * sizes.hidden
        yield _Moment("layer forward", self.waiting(), forward, buffers=buffers)
        mlp = sizes.hidden + gathered + sizes.inner
        attention = sizes.qkv + sizes.query + sizes.hidden + sizes.dq + 2 * sizes.expanded
        backward = max(mlp, attention)
        yield _Moment("layer backward", self.waiting(), backward, buffers=buffers)
        if self.last:
            head = self.head(None)
            if self.fused_head:  # cross entropy in place, in the logits' own type
                element = self.job.element_bytes
                head = sizes.logits * element // (element + FP32) + sizes.hidden
            yield _Moment("head forward", self.waiting() + sizes.hidden, head=head, buffers=buffers)


def stock(job: Job) -> Peak:
    """Megatron's own layers, everything kept: the peak of the pipeline stage that needs most."""
    return _most(_Stock(job, stage) for stage in range(job.pp))


def full_recompute(job: Job) -> Peak:
    """--recompute-granularity full --recompute-method uniform --recompute-num-layers 1."""
    return _most(_FullRecompute(job, stage) for stage in range(job.pp))


def fine_grained(job: Job, modules: Sequence[str]) -> Peak:
    """--fine-grained-activation-offloading of --offload-modules; not held to a profile, since it
    needs Transformer Engine's layers."""
    return _most(_FineGrained(job, stage, modules) for stage in range(job.pp))


def memo(
    job: Job, config: MemoConfig, loss_chunks: int | None, *, stage: int | None = None
) -> Peak:
    """Memo's layers.

    Args:
        job: what is trained.
        config: ratio, chunks, resident layers.
        loss_chunks: of the head; None for stock's.
        stage: of the pipeline; None for the one that needs most.

    Raises:
        ValueError: more chunks than tokens.
    """
    stages = range(job.pp) if stage is None else (stage,)
    return _most(_Memo(job, each, config, loss_chunks) for each in stages)


def paper_memo(job: Job, *, fused_head: bool = False) -> Peak:
    """The paper's policy, as far as the paper tells; its host memory is `strategies.paper_alpha`'s.

    Args:
        job: in 16 bits.
        fused_head: cross entropy makes no copy of the logits in fp32.
    """
    return _most(_PaperMemo(job, stage, fused_head=fused_head) for stage in range(job.pp))


def _most(stages: Iterator[_Stage]) -> Peak:
    peaks = [stage.peak() for stage in stages]
    most = max(peaks, key=lambda peak: peak.parts.total)
    return replace(most, host_bytes=max(peak.host_bytes for peak in peaks))
