"""What worker processes do with sequences that ranks share, or that share a row of tokens."""

import torch
from harness import HEADS, HIDDEN, Data, block, config, data, differing, largest_error, run
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from scenarios import EVERYTHING, memo, with_settings

from megatron_memo.swap.engine import get_engine

# Ratio and chunks: one of each kind of fate in one piece, then several.
SETTINGS = ((0.0, 1), (1.0, 1), (0.5, 3))
LENGTHS = (33, 17, 52, 26)  # of packed sequences; 128 tokens in all
STYLES = ("gpt", "llama")


# ---- sequences that context-parallel ranks share


def context_parallel():
    """Memo against stock on the same ranks, and stock against one rank with the whole sequence."""
    cp = parallel_state.get_context_parallel_world_size()
    answer = {}
    for style in STYLES:
        # Of Llama's two groups of key heads one would be left over tp 2, and nothing to trade.
        other = dict(num_query_groups=4) if style == "llama" else {}
        cfg = config(style, layers=3, context_parallel_size=cp, cp_comm_type="a2a", **other)
        whole_cfg = config(style, layers=3, **other)
        sequence = 64 * cp
        whole = data(whole_cfg, sequence, 2)
        given = _of_this_rank(whole)
        if whole.rope is not None:
            given.rope = whole.rope  # upstream's table, which it has cut for this rank
            whole.rope = RotaryEmbedding(HIDDEN // HEADS, 1.0, use_cpu_initialization=True).get_emb(
                sequence
            )
        stock_block = block(cfg, None)
        stock, alone = run(stock_block, given), run(block(whole_cfg, None), whole)
        parts = _of_this_rank(Data(alone.outputs, alone.input_grads, None))
        group = parallel_state.get_context_parallel_group()
        for gradient in stock.grads.values():
            torch.distributed.all_reduce(gradient, group=group)
        for result in (stock, alone):
            _sum_shared(stock_block, result)
        answer[style] = dict(
            tokens=2 * sequence,  # two micro-batches
            outputs_of_one_rank=all(map(torch.equal, parts.inputs, stock.outputs)),
            input_grads_of_one_rank=all(map(torch.equal, parts.output_grads, stock.input_grads)),
            weight_grad_error=largest_error(alone.grads, stock.grads),
            memo=_against_stock(cfg, run(stock_block, given), given),
        )
    return answer


def _sum_shared(built, result):
    """Gradients of what sequence parallelism gives all tensor-parallel ranks, over these ranks."""
    for name, parameter in built.named_parameters():
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(
                result.grads[name], group=parallel_state.get_tensor_model_parallel_group()
            )


def _of_this_rank(whole):
    """Upstream's pieces of the sequence, each tensor-parallel rank's rows of them."""
    cp, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    tp, tp_rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )

    def mine(t):
        if tp > 1:
            parts = [torch.empty_like(t) for _ in range(tp)]
            torch.distributed.all_gather(
                parts, t.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
            )
            t = torch.cat(parts)
        pieces = t.chunk(2 * cp)
        held = torch.cat((pieces[rank], pieces[2 * cp - 1 - rank]))
        return held.chunk(tp)[tp_rank].contiguous()

    return Data([mine(t) for t in whole.inputs], [mine(t) for t in whole.output_grads], None)


def _against_stock(cfg, stock, given):
    built = block(cfg, memo(0.5, 1))
    rows = []
    for ratio, chunks in SETTINGS:
        before = get_engine(built.layers[0].memo).stats()["d2h_bytes"]
        got = run(with_settings(built, memo(ratio, chunks)), given)
        copied = get_engine().stats()["d2h_bytes"] - before
        kept = run(with_settings(built, memo(ratio, chunks, resident_layers=EVERYTHING)), given)
        rows.append(
            dict(
                ratio=ratio, chunks=chunks, copied=copied, floor=_floor(cfg, given),
                differs_from_stock=differing(stock, got),
                differs_from_kept=differing(kept, got),
                weight_grad_error=largest_error(stock.grads, got.grads),
            )
        )  # fmt: skip
    return rows


def _floor(cfg, given):
    """Bytes of what goes to the host in any case: a layer's input, its attention's output and, in
    fp32 as all here, the log-sum-exp of each head."""
    x = given.inputs[0]
    tokens = x.size(0) * cfg.tensor_model_parallel_size  # in the attention of one rank
    heads = cfg.num_attention_heads // cfg.tensor_model_parallel_size
    numbers = x.numel() + tokens * heads * (HIDDEN // HEADS) + tokens * heads
    return numbers * 4 * cfg.num_layers * len(given.inputs)


# ---- sequences that share a row of tokens


def packed():
    """Memo against stock on packed sequences, and stock against each sequence by itself."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    answer = {}
    for style in STYLES:
        cfg = config(style, layers=3)
        given = data(cfg, sum(LENGTHS))
        given.packed = _description(LENGTHS)
        if given.rope is not None:
            given.rope = given.rope[: max(LENGTHS)]
        stock = run(block(cfg, None), given)
        answer[style] = dict(tokens=sum(LENGTHS), memo=_against_stock(cfg, stock, given))
        if tp == 1:
            answer[style]["each_by_itself"] = _each_by_itself(cfg, given, stock)
    return answer


def _description(lengths):
    ends = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
    )  # fmt: skip


def _each_by_itself(cfg, given, stock):
    """Whether outputs and input gradients are those of stock on one sequence at a time."""
    built, equal, start = block(cfg, None), [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        rope = None if given.rope is None else given.rope[:length]
        alone = run(built, Data([given.inputs[0][rows]], [given.output_grads[0][rows]], rope))
        equal += [
            torch.equal(alone.outputs[0], stock.outputs[0][rows]),
            torch.equal(alone.input_grads[0], stock.input_grads[0][rows]),
        ]
        start += length
    return equal
