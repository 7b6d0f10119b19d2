"""One pipeline stage's memory: what it holds, and the moments that may be its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_memo.estimate.job import Job
from megatron_memo.estimate.parts import Parts, Peak
from megatron_memo.estimate.tensors import FP32, Sizes

_CUBLAS = 32 << 20  # see ops.workspace.cublas


@dataclass(frozen=True)
class Moment:
    """Bytes beside what the stage holds all the time."""

    where: str
    skeletals: int
    transients: int = 0
    head: int = 0
    buffers: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.skeletals + self.transients + self.head + self.buffers + self.optimizer


class Stage:
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
        experts = sum(map(job.expert_parameters, self.numbers))
        master = FP32 if job.element_bytes < FP32 else 0  # fp32 weights are their own masters
        share = job.dp * job.cp if job.distributed_optimizer else 1
        among = job.expert_share if job.distributed_optimizer and experts else 1
        state = (parameters - experts) // share + experts // among
        # What a stage received and sent last is referred to until the next takes its place.
        between = 0 if self.first else 3 * self.sizes.hidden
        return {
            "weights": parameters * job.element_bytes,
            # Added up in fp32 where they are exchanged in it.
            "gradients": parameters * job.gradient_bytes,
            "optimizer": state * (master + 2 * FP32),
            "buffers": self.gather_buffer() + self.table() + self.table_rows() + between + _CUBLAS,
        }

    def table(self) -> int:
        """The RoPE table of the sequence; of latent attention each layer has its own."""
        job = self.job
        if job.latent is not None:
            return self.count * job.sequence * job.latent.rope_dim * FP32
        return job.sequence * job.head_dim * FP32 if job.rope else 0

    def _all_moments(self) -> Iterator[Moment]:
        yield from self.moments()
        job = self.job
        if self.first:
            yield from self.embedding(self.waiting())
        # Torch's Adam works in two temporaries of the largest weight.
        largest = max(job.vocabulary if self.first or self.last else 0, job.ffn)
        share = job.dp * job.cp if job.distributed_optimizer else 1
        update = 2 * largest * job.hidden // job.tp * FP32 // share
        yield Moment("update", 0, optimizer=update)

    def embedding(self, waiting: int) -> Iterator[Moment]:
        """Candidates for the peak in the word embedding's passes."""
        sizes = self.sizes
        if self.job.sequence_parallel:
            yield Moment("embedding backward", waiting, 2 * sizes.whole)
            yield Moment("embedding forward", waiting, sizes.whole + sizes.hidden)
        else:
            yield Moment("embedding backward", waiting, 2 * sizes.hidden)

    # ---- for subclasses

    def moments(self) -> Iterator[Moment]:
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
