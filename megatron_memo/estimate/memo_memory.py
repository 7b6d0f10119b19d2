"""Memory of a pipeline stage of memo's layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_memo.config import Experts as Policy
from megatron_memo.config import MemoConfig
from megatron_memo.estimate.in_flight import InFlight
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.stage_memory import Moment, Stage
from megatron_memo.estimate.tensors import Sizes
from megatron_memo.layer.chunks import Fate, plan_chunks

LAYERS_IN_FLIGHT = 2  # see swap.engine


class MemoStage(Stage):
    """Token chunks are swapped or recomputed; a few layers are in flight."""

    def __init__(self, job: Job, stage: int, memo: MemoConfig, loss_chunks: int | None) -> None:
        super().__init__(job, stage)
        self.loss_chunks = loss_chunks
        self.experts = memo.moe_experts
        shared = job.tp if job.sequence_parallel else 1
        rows = job.sequence // job.cp // shared
        chunks = plan_chunks(memo, rows, shared, keep=False)
        self.largest = max(chunk.stop - chunk.start for chunk in chunks) / rows
        self.chunks = [((chunk.stop - chunk.start) / rows, chunk.fate) for chunk in chunks]
        swapped = [c.stop - c.start for c in chunks if c.fate is Fate.SWAP]
        self.alpha = sum(swapped) / rows
        self.whole_chunk = len(chunks) == 1
        first_resident = job.layers - memo.resident_layers
        self.resident = sum(1 for number in self.numbers if number > first_resident)
        self.swapping = self.count - self.resident

    @property
    def buffer(self) -> int:
        """A swapped layer's bytes, on their way out or back."""
        return self._moved(self.sizes)

    def _moved(self, sizes: Sizes) -> int:
        mixture = sizes.moved_mixture(self.experts)
        return sizes.always + round(self.alpha * sizes.others) + mixture

    @property
    def of_resident(self) -> int:
        # A chunk's rows of the attention output are copied out of it and saved.
        sizes = self.sizes
        copied = 0 if self.whole_chunk else sizes.attended
        return sizes.always + sizes.others + copied + sizes.mixture

    def host_bytes(self) -> int:
        swapping = self.numbers[: self.swapping]
        moved = sum(self._moved(Sizes.of(self.job, number)) for number in swapping)
        if not swapping:
            return 0
        return round(round(self.in_flight * self.swapping) / self.swapping * moved)

    @property
    def kept_mixtures(self) -> int:
        """What swapping layers keep of their mixtures on the device."""
        kept = 0 if self.experts is not Policy.KEEP else self.sizes.mixture
        return round(self.in_flight * self.swapping) * kept

    def gather_buffer(self) -> int:
        # Shared experts and a loss head in one piece gather the whole sequence.
        shared = self.job.experts is not None and self.job.experts.shared_ffn
        whole = shared or (self.last and self.loss_chunks in (None, 1))
        return super().gather_buffer() if whole else round(super().gather_buffer() * self.largest)

    def table_rows(self) -> int:
        # A chunk's rows lie apart where ranks share the tokens; all layers share the copies, where
        # they share the table.
        apart = self.job.sequence_parallel and not self.whole_chunk
        return self.table() // self.job.cp if apart else 0

    def waiting(self) -> int:
        # A schedule keeps what a stage received until its backward.
        received = 0 if self.first else round(self.in_flight) * self.sizes.hidden
        return received + self.kept_mixtures

    def _in_flight_forward(self) -> int:
        """Layers whose tensors are still on the device, the one at work with them."""
        resident = min(self.resident, self.count)
        others = min(LAYERS_IN_FLIGHT - min(resident, LAYERS_IN_FLIGHT), self.swapping)
        return resident * self.of_resident + others * self.buffer

    def embedding(self, waiting: int) -> Iterator[Moment]:
        if self.loss_chunks in (None, 1):
            yield from super().embedding(waiting)
            return
        # It works in the head's chunks, beside the values or the gradient of this rank's tokens.
        sizes, chunks = self.sizes, self.loss_chunks
        yield Moment("embedding backward", waiting, sizes.hidden + 2 * sizes.whole // chunks)
        # Megatron clones the values afterwards.
        part = max(sizes.hidden, (sizes.whole + sizes.hidden) // chunks)
        yield Moment("embedding forward", waiting, sizes.hidden + part)

    def moments(self) -> Iterator[Moment]:
        sizes = self.sizes
        waiting = self.waiting()
        held = waiting + self._in_flight_forward()
        # The embedding's output is referred to as long as forward runs.
        entry = sizes.hidden if self.first else 0
        yield Moment("last layer forward", held + entry, self._forward_work())
        if self.last:
            hidden = 2 * sizes.hidden  # the last layer's output; the head's gradient of it
            yield Moment("head backward", held + hidden, head=self.head(self.loss_chunks))
        yield from self._backward(waiting)

    def _post_work(self) -> int:
        """Of the last chunk of a layer, and the layer's output."""
        sizes, largest = self.sizes, self.largest
        chunk = largest * (sizes.whole + 2 * sizes.hidden)
        if self.alpha < 1:
            chunk += largest * (sizes.inner + 2 * sizes.hidden)
        targets = 2 if sizes.mixture else 1
        return targets * sizes.hidden + round(chunk)

    def _forward_work(self) -> int:
        """Of the last chunk of a layer, or of attention."""
        sizes = self.sizes
        # Attention makes its output twice over, by heads and by tokens; the MLP's part of what
        # the layer swaps isn't there yet.
        attention = sizes.qkv + sizes.attended + sizes.expanded
        attention -= round(self.alpha * sizes.after)
        return max(self._post_work(), attention, self._experts_work())

    def _experts_work(self) -> int:
        """Of a mixture as its experts have been through: residual, its norm, and the output of the
        layer are there; tensors of less than half of a storage are copied to be moved."""
        sizes = self.sizes
        if not sizes.mixture:
            return 0
        again = sizes.copied if self.experts is Policy.SWAP else 0
        return sizes.hidden + sizes.spread + again

    def _experts_backward(self) -> int:
        """Gradients of the tokens that experts got, one by one and together; what is run again."""
        sizes = self.sizes
        again = sizes.recomputed if self.experts is Policy.RECOMPUTE else 0
        return sizes.hidden + 2 * sizes.dispatched + again

    def _backward(self, waiting: int) -> Iterator[Moment]:
        job = self.job
        if self.resident >= LAYERS_IN_FLIGHT:
            coming = self.buffer if self.swapping else 0
            kept = waiting + self.resident * self.of_resident
            yield Moment("last layer backward", kept, self._first_chunk(), buffers=coming)
        elif self.resident:
            kept = waiting + self._in_flight_forward()
            yield Moment("last layer backward", kept, self._first_chunk())
        if not self.swapping:
            return
        buffers = min(self.swapping, LAYERS_IN_FLIGHT) * self.buffer
        if job.pp > 1 and not self.last and job.micro_batches > 1:
            # The micro-batch that went forward last has not been retired yet.
            waiting += self.buffer + self.sizes.hidden
        yield Moment("attention backward", waiting, self._attention_backward(), buffers=buffers)
        yield Moment("MLP backward", waiting, self._mlp_backward(), buffers=buffers)
        if self.sizes.mixture:
            work = self._experts_backward()
            yield Moment("experts backward", waiting, work, buffers=buffers)

    def _first_chunk(self) -> int:
        """Of the chunk with which a resident layer's backward begins."""
        sizes = self.sizes
        gathered = sizes.whole if self.job.sequence_parallel else 0
        if sizes.mixture:
            return sizes.hidden + 2 * sizes.dispatched
        return sizes.hidden + round(self.largest * (gathered + sizes.inner))

    def _attention_backward(self) -> int:
        """q, k, v put together again; gradients of them, of the output and of the residual."""
        sizes, again = self.sizes, 1 - self.alpha
        work = 2 * sizes.qkv + sizes.attended + sizes.hidden + sizes.dq + 2 * sizes.expanded
        return work + round(again * sizes.before)

    def _mlp_backward(self) -> int:
        sizes = self.sizes
        work = sizes.whole + sizes.inner
        if self.alpha < 1:
            work += sizes.mlp + 3 * sizes.hidden
        return 2 * sizes.hidden + sizes.attended + round(self.largest * work)


class StepwiseStage(MemoStage):
    """The same, where a depth in steps and not in layers bounds what is in flight."""

    def __init__(
        self, job: Job, stage: int, memo: MemoConfig, loss_chunks: int | None, depth: int
    ) -> None:
        super().__init__(job, stage, memo, loss_chunks)
        self.window = InFlight(self.sizes, self.chunks, depth, self.experts)

    def moments(self) -> Iterator[Moment]:
        sizes, window = self.sizes, self.window
        waiting, entry = self.waiting(), sizes.hidden if self.first else 0
        end, attention = window.count - 1, window.attention
        held = waiting + self.resident * self.of_resident
        if self.resident < self.count and not self.resident:
            # What the layer at work holds on to until it is through.
            own = sizes.hidden + sizes.attended + sizes.statistics
            held += entry + own
            yield Moment("last layer forward", held + window.forward(end), self._last_work())
            work = sizes.qkv + sizes.attended + sizes.expanded
            yield Moment("attention forward", held + window.forward(attention), work)
            # Nothing comes back before the layers' backward begins.
            held += window.left_behind(0) - entry - own
        else:
            yield Moment("last layer forward", held + entry, self._last_work())
        if self.last:
            hidden = 2 * sizes.hidden
            yield Moment("head backward", held + hidden, head=self.head(self.loss_chunks))
        if self.resident:
            kept = waiting + self.resident * self.of_resident
            yield Moment("last layer backward", kept, self._first_chunk())
        if self.swapping:
            yield from self._steps_backward(waiting)

    def _last_work(self) -> int:
        return self._experts_work() if self.sizes.mixture else self._post_work()

    def _steps_backward(self, waiting: int) -> Iterator[Moment]:
        job, window, before = self.job, self.window, waiting
        others = job.pp > 1 and not self.last and job.micro_batches > 1
        for step in range(window.count):
            buffers = window.backward(step)
            if others:
                # Of the micro-batch that went forward last, each step of the backward gives up a
                # portion.
                waiting = before + window.left_behind(window.count - 1 - step)
            if step == window.attention:
                # Where any of q, k and v came back, the whole of them is among the buffers.
                work = self._attention_backward() - (self.sizes.qkv if self.alpha else 0)
                if self.last and not self.resident:
                    # At the turn, forward's own rows of them are there as well.
                    work += window.rows_at_turn()
                yield Moment("attention backward", waiting, work, buffers=buffers)
            elif step > 2 * len(self.chunks):
                work = self._experts_backward()
                yield Moment("experts backward", waiting, work, buffers=buffers)
            elif step > window.attention:
                yield Moment("MLP backward", waiting, self._mlp_backward(), buffers=buffers)
