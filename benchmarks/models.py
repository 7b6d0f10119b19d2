"""Command lines of the models that are measured: one place for benchmarks and documents.

Sizes of 7B to 65B are those of the MEMO paper (arXiv 2407.12117, table 2).
"""

from __future__ import annotations

from dataclasses import dataclass

ONE_M = 1 << 20


@dataclass(frozen=True)
class Model:
    """The shape of a model.

    Attributes:
        vocabulary: entries, the end of a document among them.
        groups: key and value heads of a Llama-style model (RMSNorm, SwiGLU, no biases); None for
            a GPT-style one.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int = 50257
    groups: int | None = None


MODELS = {
    "7B": Model(32, 4096, 16384, 32),
    "13B": Model(40, 5120, 20480, 40),
    "30B": Model(48, 7168, 28672, 56),
    "65B": Model(80, 8192, 32768, 64),
    "Llama-3-70B": Model(80, 8192, 28672, 64, vocabulary=128256, groups=8),
}


HOST_BYTES = 256 << 30  # of one GPU: 2 TiB for eight, as on the paper's nodes
# Units of tokens * hidden / tp 16-bit elements that a layer saves: all, and input with attention
# output, which always go to the host.
_UNITS = {"gpt": 16.0, "llama": 17.0}
_ALWAYS = 2.0


def paper_ratio(name: str, *, tokens: int = ONE_M, tp: int = 8, host: int = HOST_BYTES) -> float:
    """alpha of MEMO's program (section 4.2): the most that host memory takes, two layers resident.

    Bandwidth does not bind at this length: full swapping hides behind compute from 192K tokens on.
    0 where not even the layers' inputs fit; such a model needs more host memory than `host`.
    """
    model = MODELS[name]
    unit = 2 * tokens * model.hidden / tp
    units = _UNITS["gpt" if model.groups is None else "llama"]
    room = host / ((model.layers - 2) * unit) - _ALWAYS
    return round(min(max(room / (units - _ALWAYS), 0.0), 1.0), 3)


def flags(
    name: str,
    *,
    tokens: int = ONE_M,
    tp: int = 8,
    pp: int = 1,
    micro_batches: int = 1,
    swap_ratio: float | str | None = "paper",
) -> list[str]:
    """Megatron's and memo's flags: bf16, RoPE, sequence parallelism, distributed optimizer.

    Args:
        name: of `MODELS`.
        tokens: of a sequence; one sequence a micro-batch.
        tp, pp: ranks that share a layer, and pipeline stages.
        micro_batches: of an iteration.
        swap_ratio: "paper" for `paper_ratio`; None for stock layers.
    """
    model = MODELS[name]
    words = f"""
        --transformer-impl local --num-layers {model.layers} --hidden-size {model.hidden}
        --ffn-hidden-size {model.ffn} --num-attention-heads {model.heads}
        --seq-length {tokens} --max-position-embeddings {tokens} --position-embedding-type rope
        --micro-batch-size 1 --global-batch-size {micro_batches} --bf16 --use-distributed-optimizer
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --sequence-parallel
        --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --tokenizer-type NullTokenizer
        --vocab-size {model.vocabulary - 1} --no-rope-fusion --no-masked-softmax-fusion
    """.split()
    if model.groups is not None:
        words += f"""
            --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention
            --num-query-groups {model.groups} --untie-embeddings-and-output-weights
        """.split()
    if swap_ratio == "paper":
        swap_ratio = paper_ratio(name, tokens=tokens, tp=tp)
    if swap_ratio is not None:
        words += ["--memo-swap-ratio", str(swap_ratio)]
    return words
