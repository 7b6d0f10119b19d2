"""What is trained and how it is laid out over GPUs, as one frozen value.

Everything in `estimate` reads a `Job`; only `Job.from_args` knows Megatron's flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


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
    """

    count: int
    topk: int
    ffn: int
    shared_ffn: int
    parallel: int
    every: tuple[bool, ...]


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

    def __post_init__(self) -> None:
        for name, flag in _SIZES.items():
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{flag} {value}: must be at least 1.")
        _check_divides("--num-attention-heads", self.heads, _TP, self.tp)
        _check_divides("--num-attention-heads", self.heads, "--num-query-groups", self.groups)
        if self.groups < self.tp:
            _check_divides(_TP, self.tp, "--num-query-groups", self.groups)
        else:
            _check_divides("--num-query-groups", self.groups, _TP, self.tp)
        _check_divides("--ffn-hidden-size", self.ffn, _TP, self.tp)
        _check_divides("the padded vocabulary", self.vocabulary, _TP, self.tp)
        # Causal attention is balanced over context-parallel ranks by two pieces a rank.
        pieces = 2 * self.cp if self.cp > 1 else 1
        flag = "twice --context-parallel-size" if self.cp > 1 else "--context-parallel-size"
        _check_divides("--seq-length", self.sequence, flag, pieces)
        if self.sequence_parallel:
            part = self.sequence // self.cp
            _check_divides("--seq-length of a context-parallel rank", part, _TP, self.tp)
        if self.experts is not None:
            _check_divides(
                "--num-experts",
                self.experts.count,
                "--expert-model-parallel-size",
                self.experts.parallel,
            )
        self._check_stages()

    def _check_stages(self) -> None:
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
            _check_divides(flag, own, _VIRTUAL, self.virtual)
            shared, stages = shared - own, stages - 1
        if stages > 0:
            _check_divides("--num-layers (what is shared)", shared, _PP, stages)
            _check_divides("the layers of a stage", shared // stages, _VIRTUAL, self.virtual)
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
    def unit_bytes(self) -> int:
        """Bytes of b*s*h/(tp*cp) elements, in which DESIGN and the paper count activations."""
        return self.tokens * self.hidden * self.element_bytes // self.tp

    @property
    def iteration_tokens(self) -> int:
        """Tokens of an iteration of the whole run."""
        return self.sequence * self.micro_batch * self.micro_batches * self.dp

    def layers_of(self, stage: int, virtual: int = 0) -> range:
        """Megatron's numbers, from 1, of the layers in a model chunk of a pipeline stage."""
        counts = [self._count(s, v) for v in range(self.virtual) for s in range(self.pp)]
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
        """Whether a layer, from 1, is a mixture of experts."""
        return self.experts is not None and self.experts.every[layer - 1]

    # ---- weights of one rank

    def layer_parameters(self, layer: int) -> int:
        """Elements of a layer on one rank: projections over tp, norms and replicated biases whole.

        h*(q + 2*kv)/tp + q*h/tp + norms (2*h, twice that with biases) + the MLP: h*f*(2, gated 3)
        over tp, or its experts' share.
        """
        h, f = self.hidden, self.ffn
        wide = 2 if self.gated else 1
        keys = self.key * max(1, self.tp // self.groups)  # repeated where there are too few
        count = (h * (self.query + 2 * keys) + self.query * h) // self.tp
        count += 2 * h * (2 if self.biases else 1)
        if self.biases:
            count += (self.query + 2 * keys) // self.tp + h
        if self.has_experts(layer):
            moe = self.experts
            assert moe is not None
            own = moe.count // moe.parallel
            count += own * h * moe.ffn * (wide + 1) // self.tp + h * moe.count
            return count + h * moe.shared_ffn * (wide + 1) // self.tp
        count += h * f * (wide + 1) // self.tp
        return count + (wide * f // self.tp + h if self.biases else 0)

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
        return cls(**_fields(args, world_size))


_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CP, _VIRTUAL = "--context-parallel-size", "the virtual stages of a pipeline stage"
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
    "tp": _TP,
    "pp": _PP,
    "virtual": _VIRTUAL,
    "cp": _CP,
    "dp": "data-parallel ranks",
}


def _fields(args: Any, world_size: int | None) -> dict[str, Any]:
    """`Job`'s fields by name."""
    for name in ("multi_latent_attention", "pipeline_model_parallel_layout", "yaml_cfg"):
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: the estimate does not know it yet. Estimate without it.")
    hidden = _needed(args, "hidden_size")
    heads = _needed(args, "num_attention_heads")
    layers = _needed(args, "num_layers")
    gated = bool(getattr(args, "swiglu", False))
    ffn = getattr(args, "ffn_hidden_size", None) or _default_ffn(hidden, gated)
    head_dim = getattr(args, "kv_channels", None) or hidden // heads
    grouped = getattr(args, "group_query_attention", False)
    groups = (getattr(args, "num_query_groups", None) or heads) if grouped else heads
    tp, pp, cp = (
        getattr(args, name, None) or 1
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
    )
    for size, flag in ((tp, _TP), (pp, _PP), (cp, _CP)):
        if size < 1:
            raise ValueError(f"{flag} {size}: must be at least 1.")
    world = world_size if world_size is not None else _needed(args, "world_size")
    _check_divides("the number of GPUs", world, f"{_TP} x {_PP} x {_CP}", tp * pp * cp)
    dp = world // (tp * pp * cp)
    micro_batch = _needed(args, "micro_batch_size")
    batch = getattr(args, "global_batch_size", None) or micro_batch * dp
    _check_divides(
        "--global-batch-size", batch, "--micro-batch-size x data-parallel ranks", micro_batch * dp
    )
    precision = next((n for n in ("bf16", "fp16") if getattr(args, n, False)), "fp32")
    reduces_low = getattr(args, "grad_reduce_in_bf16", False)
    return dict(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        vocabulary=_vocabulary(args, tp),
        sequence=_needed(args, "seq_length"),
        micro_batch=micro_batch,
        micro_batches=batch // (micro_batch * dp),
        gated=gated,
        biases=bool(getattr(args, "add_bias_linear", True)),
        tied=not getattr(args, "untie_embeddings_and_output_weights", False),
        rope=getattr(args, "position_embedding_type", "rope") == "rope",
        tp=tp,
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)) and tp > 1,
        pp=pp,
        virtual=_virtual(args, layers, pp),
        virtual_group=getattr(args, "microbatch_group_size_per_vp_stage", None),
        first_layers=getattr(args, "decoder_first_pipeline_num_layers", None),
        last_layers=getattr(args, "decoder_last_pipeline_num_layers", None),
        embedding_as_layer=bool(getattr(args, "account_for_embedding_in_pipeline_split", False)),
        loss_as_layer=bool(getattr(args, "account_for_loss_in_pipeline_split", False)),
        cp=cp,
        dp=dp,
        element_bytes=_ELEMENT_BYTES[precision],
        gradient_bytes=2 if reduces_low else 4,
        distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", False)),
        overlap_grad_reduce=bool(getattr(args, "overlap_grad_reduce", False)),
        overlap_param_gather=bool(getattr(args, "overlap_param_gather", False)),
        overlap_tp=bool(getattr(args, "tp_comm_overlap", False)),
        overlap_p2p=bool(getattr(args, "overlap_p2p_comm", False)),
        cp_kind=_cp_kind(args),
        experts=_experts(args, layers, ffn),
    )


def _needed(args: Any, name: str) -> int:
    value = getattr(args, name, None)
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        raise ValueError(f"{flag} is needed for an estimate. Give it.")
    if value < 1:
        raise ValueError(f"{flag} {value}: must be at least 1.")
    return value


def _default_ffn(hidden: int, gated: bool) -> int:
    """As Megatron's `validate_args` has it."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _vocabulary(args: Any, tp: int) -> int:
    padded = getattr(args, "padded_vocab_size", None)
    if padded:
        return padded
    entries = getattr(args, "vocab_size", None)
    if not entries:
        raise ValueError(
            "the size of the vocabulary is not known: give --vocab-size with --tokenizer-type "
            "NullTokenizer, or --padded-vocab-size."
        )
    if getattr(args, "tokenizer_type", None) == "NullTokenizer":
        entries += 1  # the end of a document
    multiple = (getattr(args, "make_vocab_size_divisible_by", None) or 128) * tp
    return math.ceil(entries / multiple) * multiple


def _virtual(args: Any, layers: int, pp: int) -> int:
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if getattr(args, name, None):
            return getattr(args, name)
    of_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if not of_chunk:
        return 1
    _check_divides("--num-layers", layers, _PP, pp)
    flag = "--num-layers-per-virtual-pipeline-stage"
    _check_divides("the layers of a stage", layers // pp, flag, of_chunk)
    return layers // pp // of_chunk


def _cp_kind(args: Any) -> str:
    kind = getattr(args, "cp_comm_type", None) or "p2p"
    return kind if isinstance(kind, str) else kind[0]


def _experts(args: Any, layers: int, ffn: int) -> Experts | None:
    count = getattr(args, "num_experts", None)
    if not count:
        return None
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        every = tuple(i % frequency == 0 for i in range(layers))
    else:
        every = tuple(bool(has) for has in frequency)
        if len(every) != layers:
            raise ValueError(f"--moe-layer-freq: has {len(every)} entries for {layers} layers.")
    return Experts(
        count=count,
        topk=getattr(args, "moe_router_topk", None) or 2,
        ffn=getattr(args, "moe_ffn_hidden_size", None) or ffn,
        shared_ffn=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        parallel=getattr(args, "expert_model_parallel_size", None) or 1,
        every=every,
    )


def _check_divides(what: str, value: int, flag: str, divisor: int) -> None:
    if value % divisor:
        below, above = value // divisor * divisor, (value // divisor + 1) * divisor
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"{what} {value}: does not divide by {flag} {divisor}. Use a multiple, such as "
            f"{nearest}, or another divisor."
        )
