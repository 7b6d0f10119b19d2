"""What may be done about activations: each way as a value, and as the steps of a layer.

A layer has 2 x chunks + 1 steps, in forward's order: each chunk up to attention, attention, each
chunk from there on. A strategy says what leaves the device after which step, what comes back for
which, and what is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatron_memo.config import DEFAULT_RESIDENT_LAYERS, Experts, MemoConfig
from megatron_memo.estimate.activations import Saved
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.job import Job
from megatron_memo.layer.chunks import Fate, plan_chunks
from megatron_memo.layer.depth import Steps, prefetch_steps


@dataclass(frozen=True)
class Group:
    """Bytes that travel together.

    Attributes:
        step: after which they leave, in forward; -1 as the layer begins.
        first, last: the steps whose backward reads them first and last; backward walks the steps
            down, so `first` is not below `last`.
        nbytes: how many.
        name: what they are.
    """

    step: int
    first: int
    last: int
    nbytes: int
    name: str


@dataclass(frozen=True)
class Again:
    """Part of a layer's forward that is run once more: a kind of `Costs.step`, and its share."""

    kind: str
    share: float


@dataclass(frozen=True)
class LayerPlan:
    """What a layer does with its activations.

    Attributes:
        shares: of the tokens, by chunk.
        groups: what leaves and comes back.
        again_at_start: what is run again as the layer's backward begins.
        again: what is run again before the backward of a step.
        experts: a mixture of experts is a step of its own, the last one.
    """

    shares: tuple[float, ...] = (1.0,)
    groups: tuple[Group, ...] = ()
    again_at_start: tuple[Again, ...] = ()
    again: Mapping[int, tuple[Again, ...]] = field(default_factory=dict)
    experts: bool = False

    @property
    def steps(self) -> int:
        return 2 * len(self.shares) + 1 + self.experts

    def kind(self, step: int) -> str:
        """Of a step in forward, for `Costs.step`."""
        count = len(self.shares)
        if step < count:
            return "pre"
        if step == count:
            return "attention"
        return "post" if step <= 2 * count else "experts"

    def share(self, step: int) -> float:
        """Of the tokens that a step works on."""
        count = len(self.shares)
        whole = step == count or step > 2 * count
        return 1.0 if whole else self.shares[step % (count + 1)]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What all strategies answer. By itself it keeps everything on the device, as stock does.

    Attributes:
        depth: steps after which what a step saved has left, and before which it comes back; None
            for the paper's two layers.
        holds_back: compute waits for a copy to the host before the memory is used again. Without,
            the memory is given up whenever the copy is done, and nothing bounds what waits.
    """

    depth: int | None = None
    holds_back: bool = True

    @property
    def name(self) -> str:
        return "stock"

    @property
    def loss_chunks(self) -> int | None:
        """Token chunks of the loss head; None for stock's."""
        return None

    def chunked(self, job: Job) -> int | None:
        """Token chunks that have phases of their own; None for a layer in one piece."""
        return None

    def of(self, job: Job) -> Strategy:
        """The same with every choice made that depends on the job."""
        return self

    def plan(self, costs: Costs, layer: int) -> LayerPlan:
        """What a layer, from 1, does."""
        return LayerPlan(experts=costs.job.has_experts(layer))


@dataclass(frozen=True)
class Stock(Strategy):
    """Everything stays on the device."""


@dataclass(frozen=True)
class FullRecompute(Strategy):
    """Megatron's --recompute-granularity full, one layer at a time: only inputs stay."""

    @property
    def name(self) -> str:
        return "full recompute"

    def plan(self, costs: Costs, layer: int) -> LayerPlan:
        whole, experts = ["pre", "attention", "post"], costs.job.has_experts(layer)
        again = tuple(Again(kind, 1.0) for kind in whole + ["experts"] * experts)
        return LayerPlan(again_at_start=again, experts=experts)


# Inputs that --offload-modules names: after which step of an unchunked layer they have been read,
# and how many bytes.
_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


@dataclass(frozen=True)
class FineGrainedOffload(Strategy):
    """Megatron's --fine-grained-activation-offloading of a dense layer.

    Inputs of the named modules leave when the module is through, and come back one module ahead;
    the last layer's stay. The rest is kept. Compute does not wait for copies to the host.

    Attributes:
        modules: of --offload-modules.
    """

    modules: tuple[str, ...] = _MODULES
    depth: int | None = field(default=1, kw_only=True)
    holds_back: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        unknown = [name for name in self.modules if name not in _MODULES]
        if unknown or not self.modules:
            raise ValueError(
                f"--offload-modules {' '.join(unknown) or '(none)'}: the estimate knows "
                f"{', '.join(_MODULES)}."
            )

    @property
    def name(self) -> str:
        return "fine-grained offload"

    def plan(self, costs: Costs, layer: int) -> LayerPlan:
        if layer == costs.job.layers:
            return LayerPlan()
        saved = costs.saved(layer)
        nbytes = {
            "attn_norm": (0, saved.input),
            "qkv_linear": (0, saved.input),
            "core_attn": (1, saved.qkv),
            "attn_proj": (1, saved.attention + saved.statistics),
            "mlp_norm": (2, saved.input),
        }
        groups = []
        for step in range(3):
            own = [name for name in self.modules if nbytes[name][0] == step]
            if own:
                total = sum(nbytes[name][1] for name in own)
                groups.append(Group(step, step, step, total, ", ".join(own)))
        return LayerPlan(groups=tuple(groups))


@dataclass(frozen=True)
class Memo(Strategy):
    """Ours: token chunks are swapped or recomputed.

    Attributes:
        ratio: alpha, the share of tokens that is swapped.
        chunks: token chunks of a layer; None for the layer's own choice.
        resident: last layers of the model that keep everything.
        loss: token chunks of the loss head; None for stock's.
        prefetch: what decides `depth`, as --memo-prefetch-depth does; None leaves it as it is.
        experts: what becomes of what a mixture of experts saves.
    """

    ratio: float = 1.0
    chunks: int | None = None
    resident: int = DEFAULT_RESIDENT_LAYERS
    loss: int | None = None
    prefetch: int | str | None = None
    experts: Experts = Experts.SWAP

    def __post_init__(self) -> None:
        self._config()
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"--memo-prefetch-depth {self.depth}: must be at least 1.")

    @property
    def name(self) -> str:
        return f"memo {self.ratio:.3g}"

    @property
    def loss_chunks(self) -> int | None:
        return self.loss

    def _config(self) -> MemoConfig:
        return MemoConfig(self.ratio, self.chunks, self.resident, moe_experts=self.experts)

    def _chunks(self, job: Job, *, keep: bool) -> list[tuple[float, Fate]]:
        rows = job.sequence // job.cp // (job.tp if job.sequence_parallel else 1)
        tp = job.tp if job.sequence_parallel else 1
        cut = plan_chunks(self._config(), rows, tp, keep=keep)
        return [((chunk.stop - chunk.start) / rows, chunk.fate) for chunk in cut]

    def chunked(self, job: Job) -> int | None:
        return len(self._chunks(job, keep=False))

    def of(self, job: Job) -> Memo:
        if self.prefetch is None:
            return self
        # Layers without experts have a step less, and at most as much in flight.
        steps = Steps(len(self._chunks(job, keep=False)), experts=job.experts is not None)
        memo = replace(self._config(), prefetch_depth=self.prefetch)
        depth = prefetch_steps(memo, steps, job.sequence // job.cp)
        return replace(self, depth=depth, prefetch=None)

    def plan(self, costs: Costs, layer: int) -> LayerPlan:
        job = costs.job
        keep = layer > job.layers - self.resident
        chunks = self._chunks(job, keep=keep)
        shares = tuple(share for share, _ in chunks)
        mixture = job.has_experts(layer)
        if keep:
            return LayerPlan(shares, experts=mixture)
        dropped = [k for k, (_, fate) in enumerate(chunks) if fate is Fate.RECOMPUTE]
        attention = len(chunks)
        again: dict[int, tuple[Again, ...]] = {
            attention + 1 + k: (Again("again post", shares[k]),) for k in dropped
        }
        if dropped:
            again[attention] = tuple(Again("again pre", shares[k]) for k in dropped)
        if mixture and self.experts is Experts.RECOMPUTE:
            again[2 * attention + 1] = (Again("again experts", 1.0),)
        groups = _groups(chunks, costs.saved(layer, self.experts))
        return LayerPlan(shares, tuple(groups), again=again, experts=mixture)


def _groups(chunks: list[tuple[float, Fate]], saved: Saved) -> Iterator[Group]:
    attention, end = len(chunks), 2 * len(chunks)
    # Recomputed chunks come last, so backward begins with one if there is any, and that reads the
    # input; swapped ones read it before attention only. All read the attention output.
    recomputes = chunks[-1][1] is Fate.RECOMPUTE
    yield Group(-1, end if recomputes else attention - 1, 0, saved.input, "input")
    for k, (share, fate) in enumerate(chunks):
        if fate is Fate.SWAP:
            yield Group(k, k, k, round(share * saved.pre), f"chunk {k}, norm")
            yield Group(k, attention, attention, round(share * saved.qkv), f"chunk {k}, q k v")
    output = saved.attention + saved.statistics
    yield Group(attention, end, attention, output, "attention output")
    for k, (share, fate) in enumerate(chunks):
        if fate is Fate.SWAP:
            step = attention + 1 + k
            yield Group(step, step, step, round(share * saved.post), f"chunk {k}, MLP")
    if saved.experts:
        yield Group(end + 1, end + 1, end + 1, saved.experts, "experts")


@dataclass(frozen=True)
class PaperMemo(Strategy):
    """The MEMO paper's own: a layer in one piece, two rounding buffers, alpha by its program.

    Attributes:
        ratio: alpha; None for what the program says.
        resident: last layers that are not swapped.
    """

    ratio: float | None = None
    resident: int = 2

    @property
    def name(self) -> str:
        return "paper's memo"

    def alpha(self, costs: Costs) -> float:
        """The ratio that is used.

        Raises:
            ValueError: not even alpha 0 fits.
        """
        return paper_alpha(costs, self.resident) if self.ratio is None else self.ratio

    def plan(self, costs: Costs, layer: int) -> LayerPlan:
        if layer > costs.job.layers - self.resident:
            return LayerPlan()
        alpha, saved = self.alpha(costs), costs.saved(layer)
        nbytes = saved.always + round(alpha * saved.others)
        again: tuple[Again, ...] = ()
        if alpha < 1:
            again = Again("again pre", 1 - alpha), Again("again post", 1 - alpha)
        return LayerPlan(groups=(Group(2, 2, 0, nbytes, "layer"),), again_at_start=again)


def paper_alpha(costs: Costs, resident: int = 2) -> float:
    """alpha of the paper's program (section 4.2).

    The most alpha <= 1 with (input + attention + alpha x others) / B <= forward of a layer, and
    (layers - 2) x (the same bytes) <= a GPU's share of host memory. B is the bandwidth to the host
    that one GPU sees; layers are those of the pipeline stage with most micro-batches in flight.

    Raises:
        ValueError: not even alpha = 0 fits host memory.
    """
    job, saved = costs.job, costs.saved(1)
    swapped = max(len(job.layers_of(0)) * job.virtual - (resident if job.pp == 1 else 0), 0)
    in_flight = min(job.pp, job.micro_batches)
    host = costs.machine.host_memory_of_gpu
    if not swapped:
        return 1.0
    always = saved.input + saved.attention  # the paper has no log-sum-exp
    room = host / (swapped * in_flight)
    if room < always:
        needed = swapped * in_flight * always * costs.machine.gpus
        raise ValueError(
            f"--host-memory: layer inputs and attention outputs alone need {needed / 2**30:.0f} "
            f"GiB a node, {costs.machine.host_memory / 2**30:.0f} GiB are there. Give more host "
            "memory, or use more GPUs."
        )
    by_memory = (room - always) / saved.others
    by_time = (costs.layer_forward() * costs.d2h - always) / saved.others
    return min(1.0, by_memory, max(by_time, 0.0))
