"""Seconds of every step of an iteration on one rank: a roofline with efficiencies.

A matrix product takes the longer of its operations at the dense rate and its bytes at the device
memory's, and is slower where its tiles do not fill the GPU: that is what small chunks cost. All
else in a layer is bound by memory and counted in passes over its tensors. Collectives take
(n - 1)/n of their bytes over the slowest link of the group (rings, and NVSwitch alike).

Times are of the work alone; who waits for whom is `timeline`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_memo.config import Experts
from megatron_memo.estimate import flops
from megatron_memo.estimate.activations import Saved, saved
from megatron_memo.estimate.calibration import Calibration
from megatron_memo.estimate.hardware import Machine
from megatron_memo.estimate.job import Job

_TILE = 128  # rows and columns of a matrix product that one multiprocessor works on at a time
_DEPTH = 1024  # of the sum that is worth splitting over multiprocessors
_FP32 = 4
# Passes over memory of a fused Adam step: fp32 weight, two moments and gradient read, three of
# them written, in bytes an element of the rank's share; the 16-bit weight comes on top.
_ADAM_BYTES = 4 * _FP32 + 3 * _FP32


@dataclass(frozen=True)
class Step:
    """Seconds of one step of a layer: a half of it on one chunk of tokens, or attention.

    Attributes:
        compute: on the compute stream.
        serial: of tensor-parallel communication that compute waits for.
        beside: of tensor-parallel communication that runs while the step computes.
        ring: of context-parallel communication that runs while the step computes.
        exchange: of context-parallel communication that compute waits for.
    """

    compute: float
    serial: float = 0.0
    beside: float = 0.0
    ring: float = 0.0
    exchange: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds if nothing else runs."""
        return self.serial + self.exchange + max(self.compute, self.beside, self.ring)

    def after(self, other: Step) -> Step:
        """Both, `other` first."""
        return Step(
            self.compute + other.compute,
            self.serial + other.serial,
            self.beside + other.beside,
            self.ring + other.ring,
            self.exchange + other.exchange,
        )


class Costs:
    """What a job's steps cost on a machine.

    Args:
        job: sizes and layout.
        machine: GPUs and links.
        calibration: efficiencies.
    """

    def __init__(self, job: Job, machine: Machine, calibration: Calibration | None = None):
        self.job, self.machine = job, machine
        self.efficiency = calibration or Calibration()
        self._rate = machine.gpu.dense_rate / (2 if job.element_bytes == _FP32 else 1)
        self._memory = machine.gpu.memory_bandwidth * self.efficiency.memory
        self.step = lru_cache(maxsize=None)(self._step)

    # ---- operators

    def gemm(self, rows: float, inner: float, columns: float) -> float:
        """[rows, inner] x [inner, columns]."""
        tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        pieces = tiles * max(1, int(inner // _DEPTH))
        units = self.machine.gpu.multiprocessors
        filled = pieces / (math.ceil(pieces / units) * units)
        rate = self._rate * self.efficiency.gemm * filled
        element = self.job.element_bytes
        moved = element * (rows * inner + inner * columns + rows * columns)
        return max(2.0 * rows * inner * columns / rate, moved / self._memory)

    def memory_bound(self, nbytes: float) -> float:
        """Reading and writing so many bytes in all."""
        return nbytes / self._memory

    def collective(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """All-gather or reduce-scatter of `nbytes` (the whole) over `ranks`.

        Args:
            nbytes: of the gathered tensor.
            ranks: of the group.
            stride: distance between the group's ranks; the group leaves the node if ranks x stride
                does.
        """
        if ranks == 1:
            return 0.0
        return (ranks - 1) / ranks * nbytes / self.bandwidth(ranks * stride)

    def bandwidth(self, spread: int) -> float:
        """Bytes a second between ranks of which the farthest are `spread` apart."""
        if spread <= self.machine.gpus:
            return self.machine.gpu.nvlink * self.efficiency.nvlink
        return self.machine.network * self.efficiency.network

    @cached_property
    def d2h(self) -> float:
        """Bytes a second to the host while all GPUs of the node copy."""
        return self.machine.gpu.host_bandwidth * self.efficiency.d2h

    @cached_property
    def h2d(self) -> float:
        """Bytes a second from the host, likewise."""
        return self.machine.gpu.host_bandwidth * self.efficiency.h2d

    # ---- steps of a layer

    def saved(self, layer: int, experts: Experts = Experts.SWAP) -> Saved:
        """Bytes that the layer saves."""
        on_cuda = self.machine.gpu.name != "cpu"
        return saved(self.job, layer, on_cuda=on_cuda, experts=experts)

    def _step(self, kind: str, layer: int, share: float = 1.0) -> Step:
        """A step of a layer.

        Args:
            kind: "pre", "attention", "post", "experts" (forward); with "backward " before it, or
                "again " for what recomputation redoes. "post" ends before the MLP where the layer
                has experts.
            layer: from 1; only the MLP may differ between layers.
            share: of the rank's tokens that the chunk holds; attention and experts have them all.
        """
        direction, _, part = kind.rpartition(" ")
        if part == "attention":
            return self._attention(direction == "backward")
        if part == "pre":
            return self._pre(share, direction == "backward")
        if part == "experts":
            return self._experts(direction)
        if self.job.has_experts(layer):
            return self._projection(share, direction == "backward")
        return self._post(share, direction)

    def _attention(self, backward: bool) -> Step:
        job = self.job
        operations = flops.attention(job, causal=True)
        share = (
            self.efficiency.attention_backward if backward else self.efficiency.attention_forward
        )
        operations *= flops.ATTENTION_BACKWARD if backward else 1
        compute = operations / (self._rate * share)
        if job.cp == 1:
            return Step(compute)
        element, ways = job.element_bytes, 2 if backward else 1
        keys = 2 * job.tokens * job.key * element / job.tp  # k and v of this rank's tokens
        link = self.bandwidth(job.tp * job.cp)
        if job.cp_kind in ("p2p", "a2a+p2p"):
            return Step(compute, ring=ways * keys * (job.cp - 1) / link)
        if job.cp_kind == "all_gather":
            return Step(compute, exchange=ways * keys * (job.cp - 1) / link)
        queries = 2 * job.tokens * job.query * element / job.tp  # q and the output
        return Step(compute, exchange=(keys + queries) * (job.cp - 1) / job.cp / link)

    def _pre(self, share: float, backward: bool) -> Step:
        """Norm, gather, QKV, RoPE."""
        job = self.job
        rows, tp = job.tokens * share, job.tp
        products = [(inner, columns / tp) for inner, columns in flops.projections(job)]
        local = job.local_tokens * share * job.hidden * job.element_bytes
        turned = rows * (job.query + job.key) / job.tp * job.element_bytes if job.rope else 0.0
        gather = self._gather(share)
        if not backward:
            moved = 2 * local + 2 * turned
            compute = sum(self.gemm(rows, *product) for product in products)
            compute += self.memory_bound(moved)
            return Step(compute, self._exposed(gather if job.sequence_parallel else 0.0))
        compute = sum(self._gemm_backward(rows, *product) for product in products)
        compute += self.memory_bound(4 * local + 2 * turned)
        return Step(compute, beside=2 * gather)

    def _post(self, share: float, direction: str) -> Step:
        """Output projection, residual, norm, MLP, residual."""
        job = self.job
        backward, again = direction == "backward", direction == "again"
        rows, h, wide = job.tokens * share, job.hidden, 2 if job.gated else 1
        query, inner = job.attended / job.tp, job.ffn / job.tp
        local = job.local_tokens * share * h * job.element_bytes
        gather = self._gather(share)
        activation = rows * inner * job.element_bytes
        sp = job.sequence_parallel
        if backward:
            compute = self._gemm_backward(rows, query, h)
            compute += self._gemm_backward(rows, h, wide * inner)
            compute += self._gemm_backward(rows, inner, h)
            compute += self.memory_bound(10 * local + (2 * wide + 1) * activation)
            # Both row-parallel outputs' gradients are gathered before anything else can begin;
            # fc1's input is gathered, its gradient reduced, beside the matrix products.
            return Step(compute, 2 * gather if sp else 0.0, beside=2 * gather)
        compute = self.gemm(rows, query, h) + self.gemm(rows, h, wide * inner)
        compute += self.memory_bound(5 * local + (wide + 1) * activation)
        collectives = 2 if again and sp else 3 if sp else 2 if again else 4
        if not again:
            compute += self.gemm(rows, inner, h) + self.memory_bound(3 * local)
        return Step(compute, self._exposed(collectives * gather))

    def _projection(self, share: float, backward: bool) -> Step:
        """Output projection, residual and norm of a layer with experts."""
        job = self.job
        rows, query = job.tokens * share, job.attended / job.tp
        local = job.local_tokens * share * job.hidden * job.element_bytes
        gather = self._gather(share)
        if backward:
            compute = self._gemm_backward(rows, query, job.hidden) + self.memory_bound(6 * local)
            return Step(compute, gather if job.sequence_parallel else 0.0)
        compute = self.gemm(rows, query, job.hidden) + self.memory_bound(4 * local)
        return Step(compute, self._exposed((1 if job.sequence_parallel else 2) * gather))

    def _experts(self, direction: str) -> Step:
        """Router, dispatch, a rank's experts with as many tokens as all others', the shared ones,
        combine. Exchanges are waited for; what is run again has its tokens already."""
        job, moe = self.job, self.job.experts
        assert moe is not None
        h, tp, element = job.hidden, job.expert_tp, job.element_bytes
        own, count = moe.count // moe.parallel, 2 if direction == "backward" else 1
        visits = job.local_tokens * moe.topk * tp
        wide = 2 if job.gated else 1
        gemm = self._gemm_backward if count == 2 else self.gemm
        sizes = [(own, visits / own, moe.ffn / tp)]
        if moe.shared_ffn:
            sizes.append((1, job.tokens, moe.shared_ffn / job.tp))
        compute = 0.0
        for number, rows, inner in sizes:
            compute += number * (gemm(rows, h, wide * inner) + gemm(rows, inner, h))
            compute += self.memory_bound(count * (wide + 1) * number * rows * inner * element)
        if direction == "again":
            return Step(compute)
        compute += gemm(job.local_tokens, h, moe.count)
        # Sorting by experts and back, where the tokens are and where the experts are.
        compute += self.memory_bound(count * 8 * visits / tp * h * element)
        nbytes = visits / tp * h * element
        exchange = self.collective(nbytes, moe.parallel, tp) * 2
        exchange += self.collective(nbytes * tp, tp) * 2
        shared = 2 * self._gather(1.0) if moe.shared_ffn else 0.0
        return Step(compute, exchange + (shared if count == 1 else shared / 2), beside=shared)

    def _gemm_backward(self, rows: float, inner: float, columns: float) -> float:
        """Gradients of the input and of the weight."""
        return self.gemm(rows, columns, inner) + self.gemm(inner, rows, columns)

    def _gather(self, share: float) -> float:
        """One gather or reduce-scatter of a chunk over the tensor-parallel group.

        An all-reduce, where there is no sequence parallelism, is two of them.
        """
        job = self.job
        nbytes = job.tokens * share * job.hidden * job.element_bytes
        return self.collective(nbytes, job.tp)

    def _exposed(self, seconds: float) -> float:
        return seconds * (1 - self.efficiency.tp_hidden) if self.job.overlap_tp else seconds

    def layer_forward(self, layer: int = 1, chunks: int = 1) -> float:
        """Seconds of a layer's forward in equal chunks, if nothing waits."""
        share = 1 / chunks
        halves = self.step("pre", layer, share).alone + self.step("post", layer, share).alone
        seconds = chunks * halves + self.step("attention", layer).alone
        if self.job.has_experts(layer):
            seconds += self.step("experts", layer).alone
        return seconds

    # ---- ends of the model, and what follows backward

    def embedding(self, backward: bool) -> Step:
        """Looking up, or adding to, the rows of the table; their sum over the group."""
        job = self.job
        nbytes = job.tokens * job.hidden * job.element_bytes
        return Step(self.memory_bound((3 if backward else 2) * nbytes), self._gather(1.0))

    def head(self, backward: bool, chunks: int | None) -> Step:
        """Final norm, output projection, cross entropy.

        Args:
            backward: backward of it.
            chunks: token chunks of memo's loss head, which computes logits again in backward; None
                for stock's.
        """
        job = self.job
        rows, columns = job.tokens, job.vocabulary / job.tp
        logits = rows * columns * _FP32
        local = job.local_tokens * job.hidden * job.element_bytes
        count = chunks or 1
        product = count * self.gemm(rows / count, job.hidden, columns)
        gather = self._gather(1.0) if job.sequence_parallel else 0.0
        if not backward:
            return Step(product + self.memory_bound(4 * logits + 2 * local), gather)
        compute = count * self._gemm_backward(rows / count, job.hidden, columns)
        compute += self.memory_bound(3 * logits + 4 * local)
        serial = gather
        if chunks is not None:
            compute, serial = compute + product + self.memory_bound(3 * logits), serial + gather
        return Step(compute, serial, beside=gather)

    def optimizer(self, stage: int) -> tuple[float, float]:
        """The gradients' norm, then Adam's step, of a pipeline stage."""
        job = self.job
        count = job.parameters(stage)
        own = count / job.dp if job.distributed_optimizer else count
        return (
            self.memory_bound(own * _FP32),
            self.memory_bound(own * (_ADAM_BYTES + job.element_bytes)),
        )

    def reduce_gradients(self, parameters: float) -> float:
        """Seconds to sum so many elements' gradients over data and context parallelism.

        A reduce-scatter with the distributed optimizer; else an all-reduce, which is two.
        """
        job = self.job
        ranks = job.dp * job.cp
        ways = 1 if job.distributed_optimizer else 2
        return ways * self.collective(parameters * job.gradient_bytes, ranks, job.tp)

    def gather_parameters(self, parameters: float) -> float:
        """Seconds to gather so many updated elements; 0 without a distributed optimizer."""
        job = self.job
        if not job.distributed_optimizer:
            return 0.0
        return self.collective(parameters * job.element_bytes, job.dp * job.cp, job.tp)

    def send_stage(self) -> float:
        """One micro-batch's activations, or their gradients, to the next pipeline stage."""
        job = self.job
        nbytes = job.local_tokens * job.hidden * job.element_bytes
        return nbytes / self.bandwidth(job.tp * job.cp * job.dp * 2)
