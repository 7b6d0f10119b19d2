"""What is trained and how it is laid out over GPUs, as one frozen value.

Everything in `estimate` reads a `Job`; only `Job.from_args` knows Megatron's flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_memo.layer.shape import ExpertShape, LatentShape


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers of a model.

    Attributes:
        count: experts of a layer.
        topk: experts that each token visits.
        ffn: inner size of an expert.
        shared_ffn: inner size of the experts that every token visits; 0 without.
        parallel: ranks over which a layer's experts are spread.
        every: which layers have experts, in order; the others have the dense MLP.
        tp: ranks that split an expert; None for as many as split the rest.
        shape: what else decides the bytes that a layer saves; None for plain experts. Its own
            sizes and numbers of ranks are not looked at.
    """

    count: int
    topk: int
    ffn: int
    shared_ffn: int
    parallel: int
    every: tuple[bool, ...]
    tp: int | None = None
    shape: ExpertShape | None = None


@dataclass(frozen=True)
class Job:
    """One training run. Sizes are of the whole model and of whole sequences.

    Attributes:
        layers, hidden, ffn, heads, head_dim: of the transformer; `ffn` is the MLP's inner size.
        groups: key and value heads (`heads` without grouped queries).
        vocabulary: entries, padded as Megatron pads them.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches of an iteration on one data-parallel rank.
        gated: the MLP multiplies by a gate (SwiGLU), so its first projection is twice as wide.
        biases: linear layers have biases.
        tied: the output projection is the embedding.
        rope: positions are rotations of q and k.
        saved_rope: dimensions of a head whose cosines and sines are saved (RoPE is not fused).
        rms_norm: norms are RMSNorm, else LayerNorm.
        qk_norm: queries and keys are normalised.
        dropout: hidden dropout is above 0.
        fused_activation: bias, activation and gate are one kernel.
        tp, pp, cp, dp: ranks of tensor, pipeline, context and data parallelism.
        sequence_parallel: what lies between tensor-parallel regions is split over tokens.
        virtual: model chunks of a pipeline stage; 1 is the plain schedule.
        virtual_group: micro-batches that run through one model chunk before the next one's turn.
        first_layers, last_layers: layers of the first and last stage; None for an equal share.
        embedding_as_layer, loss_as_layer: embedding, loss count as a layer when layers are shared.
        element_bytes: of activations and weights at work.
        gradient_bytes: of an element of the gradients that ranks exchange.
        distributed_optimizer: each data-parallel rank updates its share of the weights.
        overlap_grad_reduce, overlap_param_gather, overlap_tp, overlap_p2p: which communication
            Megatron hides behind compute.
        cp_kind: "p2p", "all_gather", "a2a" or "a2a+p2p".
        experts: None for a dense model.
        latent: of multi-latent attention, None without; `head_dim` is then that of a query.
        layout: layers of each model chunk of each stage, from the first stage on; None where the
            flags above deal them out.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    groups: int
    vocabulary: int
    sequence: int
    micro_batch: int = 1
    micro_batches: int = 1
    gated: bool = False
    biases: bool = True
    tied: bool = True
    rope: bool = True
    saved_rope: int = 0
    rms_norm: bool = False
    qk_norm: bool = False
    dropout: bool = False
    fused_activation: bool = True
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual: int = 1
    virtual_group: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    embedding_as_layer: bool = False
    loss_as_layer: bool = False
    cp: int = 1
    dp: int = 1
    element_bytes: int = 2
    gradient_bytes: int = 4
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tp: bool = False
    overlap_p2p: bool = False
    cp_kind: str = "p2p"
    experts: Experts | None = None
    latent: LatentShape | None = None
    layout: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name, flag in _SIZES.items():
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{flag} {value}: must be at least 1.")
        check_divides("--num-attention-heads", self.heads, TP_FLAG, self.tp)
        check_divides("--num-attention-heads", self.heads, "--num-query-groups", self.groups)
        if self.groups < self.tp:
            check_divides(TP_FLAG, self.tp, "--num-query-groups", self.groups)
        else:
            check_divides("--num-query-groups", self.groups, TP_FLAG, self.tp)
        check_divides("--ffn-hidden-size", self.ffn, TP_FLAG, self.tp)
        check_divides("the padded vocabulary", self.vocabulary, TP_FLAG, self.tp)
        # Causal attention is balanced over context-parallel ranks by two pieces a rank.
        pieces = 2 * self.cp if self.cp > 1 else 1
        flag = "twice --context-parallel-size" if self.cp > 1 else "--context-parallel-size"
        check_divides("--seq-length", self.sequence, flag, pieces)
        if self.sequence_parallel:
            part = self.sequence // self.cp
            check_divides("--seq-length of a context-parallel rank", part, TP_FLAG, self.tp)
        if self.experts is not None:
            check_divides(
                "--num-experts",
                self.experts.count,
                "--expert-model-parallel-size",
                self.experts.parallel,
            )
            split = self.experts.parallel * self.expert_tp
            ranks = "the number of GPUs of a pipeline stage"
            flags = "--expert-model-parallel-size x --expert-tensor-parallel-size"
            check_divides(ranks, self.ranks // self.pp, flags, split)
            check_divides(
                "--moe-ffn-hidden-size", self.experts.ffn, "the ranks of an expert", self.expert_tp
            )
        self._check_stages()

    def _check_stages(self) -> None:
        if self.layout is not None:
            assert len(self.layout) == self.pp and len(self.layout[0]) == self.virtual
            dealt = sum(map(sum, self.layout))
            if dealt != self.layers:
                raise ValueError(
                    f"--pipeline-model-parallel-layout: has {dealt} layers and --num-layers is "
                    f"{self.layers}."
                )
            return
        if self.virtual > 1 and self.pp == 1:
            raise ValueError(
                f"{self.virtual} virtual pipeline stages: need --pipeline-model-parallel-size of "
                "at least 2. Drop the virtual stages."
            )
        shared, stages = self.layers + self.embedding_as_layer + self.loss_as_layer, self.pp
        for flag, own in (
            ("--decoder-first-pipeline-num-layers", self.first_layers),
            ("--decoder-last-pipeline-num-layers", self.last_layers),
        ):
            if own is None:
                continue
            if not 0 < own <= shared:
                raise ValueError(f"{flag} {own}: {shared} layers are there to be shared.")
            check_divides(flag, own, VIRTUAL, self.virtual)
            shared, stages = shared - own, stages - 1
        if stages > 0:
            check_divides("--num-layers (what is shared)", shared, PP_FLAG, stages)
            check_divides("the layers of a stage", shared // stages, VIRTUAL, self.virtual)
        elif shared:
            raise ValueError(f"--num-layers {self.layers}: {shared} layers belong to no stage.")

    # ---- sizes of one rank

    @property
    def ranks(self) -> int:
        """GPUs of the whole run."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank's attention and matrix products work on."""
        return self.sequence * self.micro_batch // self.cp

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch in a layer's input: a share of `tokens` if they are split."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def query(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Columns of all key heads; as many for the values."""
        return self.groups * self.head_dim

    @property
    def value(self) -> int:
        """Columns of all value heads."""
        return self.heads * self.latent.v_dim if self.latent else self.key

    @property
    def attended(self) -> int:
        """Columns of the attention's output, before its projection."""
        return self.value if self.latent else self.query

    @property
    def expert_tp(self) -> int:
        """Ranks that split an expert."""
        return (self.experts.tp if self.experts else None) or self.tp

    @property
    def expert_share(self) -> int:
        """Ranks among which the optimizer's state of an expert is shared out."""
        assert self.experts is not None
        return max(self.ranks // self.pp // (self.expert_tp * self.experts.parallel), 1)

    @property
    def unit_bytes(self) -> int:
        """Bytes of b*s*h/(tp*cp) elements, in which DESIGN and the paper count activations."""
        return self.tokens * self.hidden * self.element_bytes // self.tp

    @property
    def iteration_tokens(self) -> int:
        """Tokens of an iteration of the whole run."""
        return self.sequence * self.micro_batch * self.micro_batches * self.dp

    def layers_of(self, stage: int, virtual: int = 0) -> range:
        """Megatron's numbers, from 1, of the layers in a model chunk of a pipeline stage."""
        count = self._count if self.layout is None else lambda s, v: self.layout[s][v]
        counts = [count(s, v) for v in range(self.virtual) for s in range(self.pp)]
        place = virtual * self.pp + stage
        start = sum(counts[:place]) + 1
        return range(start, start + counts[place])

    def _count(self, stage: int, virtual: int) -> int:
        first, last = stage == 0, stage == self.pp - 1
        shared, stages = self.layers + self.embedding_as_layer + self.loss_as_layer, self.pp
        for own in (self.first_layers, self.last_layers):
            if own is not None:
                shared, stages = shared - own, stages - 1
        count = shared // stages if stages else 0
        if first and self.first_layers is not None:
            count = self.first_layers
        if last and self.last_layers is not None:
            count = self.last_layers
        count //= self.virtual
        if first and virtual == 0 and self.embedding_as_layer:
            count -= 1
        if last and virtual == self.virtual - 1 and self.loss_as_layer:
            count -= 1
        return count

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 1, is a mixture of experts; 0 stands for one without."""
        return self.experts is not None and layer > 0 and self.experts.every[layer - 1]

    # ---- weights of one rank

    def layer_parameters(self, layer: int) -> int:
        """Elements of a layer on one rank: projections over tp, norms and replicated biases whole.

        h*(q + 2*kv)/tp + q*h/tp + norms (2*h, twice that with biases) + the MLP: h*f*(2, gated 3)
        over tp, or its experts' share.
        """
        h, f = self.hidden, self.ffn
        wide = 2 if self.gated else 1
        count = self._attention_parameters()
        count += 2 * h * (2 if self.biases else 1)
        if self.has_experts(layer):
            moe = self.experts
            assert moe is not None
            count += h * moe.count + h * moe.shared_ffn * (wide + 1) // self.tp
            return count + self.expert_parameters(layer)
        count += h * f * (wide + 1) // self.tp
        return count + (wide * f // self.tp + h if self.biases else 0)

    def expert_parameters(self, layer: int) -> int:
        """Of a layer's, elements of the experts that this rank has; 0 without."""
        if not self.has_experts(layer):
            return 0
        moe = self.experts
        assert moe is not None
        matrices = 3 if self.gated else 2
        return moe.count // moe.parallel * self.hidden * moe.ffn * matrices // self.expert_tp

    def _attention_parameters(self) -> int:
        h, tp = self.hidden, self.tp
        if self.latent is not None:
            q, kv = self.latent.q_rank, self.latent.kv_rank
            count = q * (h + self.query) if q is not None else h * self.query
            count += h * (kv + self.latent.rope_dim)
            count += kv * self.heads * (self.latent.qk_dim + self.latent.v_dim)
            return (count + self.attended * h) // tp
        keys = self.key * max(1, tp // self.groups)  # repeated where there are too few
        count = (h * (self.query + 2 * keys) + self.query * h) // tp
        return count + ((self.query + 2 * keys) // tp + h if self.biases else 0)

    def parameters(self, stage: int) -> int:
        """Elements of a pipeline stage on one rank, embedding and output projection included."""
        count = sum(
            self.layer_parameters(layer)
            for virtual in range(self.virtual)
            for layer in self.layers_of(stage, virtual)
        )
        table = self.vocabulary * self.hidden // self.tp
        if stage == 0:
            count += table
        if stage == self.pp - 1:
            count += self.hidden * (2 if self.biases else 1)  # the final norm
            if not self.tied or self.pp > 1:
                count += table
        return count

    # ---- from Megatron

    @classmethod
    def from_args(cls, args: Any, world_size: int | None = None) -> Job:
        """The job of Megatron's arguments, validated or only parsed.

        Args:
            args: Megatron's.
            world_size: GPUs; None takes `args.world_size`.

        Raises:
            ValueError: a needed flag is missing, the layout is impossible (the message names the
                divisor that is wrong), or it is of a kind that the estimate does not know.
        """
        from megatron_memo.estimate.job_from_args import fields

        return cls(**fields(args, world_size))


TP_FLAG, PP_FLAG = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
CP_FLAG, VIRTUAL = "--context-parallel-size", "the virtual stages of a pipeline stage"
_SIZES = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn": "--ffn-hidden-size",
    "heads": "--num-attention-heads",
    "head_dim": "--kv-channels",
    "groups": "--num-query-groups",
    "vocabulary": "--vocab-size",
    "sequence": "--seq-length",
    "micro_batch": "--micro-batch-size",
    "micro_batches": "micro-batches of an iteration",
    "tp": TP_FLAG,
    "pp": PP_FLAG,
    "virtual": VIRTUAL,
    "cp": CP_FLAG,
    "dp": "data-parallel ranks",
}


def check_divides(what: str, value: int, flag: str, divisor: int) -> None:
    """Raises ValueError, with the nearest multiples, unless `divisor` divides `value`."""
    if value % divisor:
        below, above = value // divisor * divisor, (value // divisor + 1) * divisor
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{what} {value}: does not divide by {flag} {divisor}. Use a multiple, such as "
            f"{nearest}, or another divisor."
        )
