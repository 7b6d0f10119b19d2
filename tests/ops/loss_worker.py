"""A GPT with stock's loss head and with memo's, on every rank of a torchrun; answers as JSON.

torchrun --nproc-per-node 2 loss_worker.py OUT.json
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "layer"))

import harness  # first: it activates the platform before anything imports Megatron
import scenarios
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_memo.layer.spec import MemoBlockSubmodules, memo_spec, mtp_spec
from megatron_memo.ops.norm import norm
from megatron_memo.profile.storage import StorageMeter
from megatron_memo.training.embedding import embedding_by
from megatron_memo.training.loss_head import LossHead
from megatron_memo.training.mtp_head import predictions_by

LOCAL_TOKENS, BATCH, VOCABULARY = 53, 2, 320
CHUNKS = (1, 2, 7, LOCAL_TOKENS)
# (type, tied embeddings, upstream's own fused cross entropy, sequence parallelism at tp 2)
MODELS = (
    ("fp32", False, False, True),
    ("fp32", True, False, True),
    ("fp32", False, True, True),
    ("fp32", False, False, False),
    ("bf16", False, False, True),
    ("bf16", True, True, True),
)
DTYPES = scenarios.DTYPES


def gpt(dtype, tied, vocabulary=VOCABULARY, **other):
    """One layer and the head; the same weights for the same arguments."""
    cfg = harness.config("llama", layers=1, dtype=DTYPES[dtype], **other)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    upstream = get_gpt_layer_local_spec(normalization=cfg.normalization)
    layer = memo_spec(upstream, cfg, None)
    block = MemoBlockSubmodules(layer_specs=[layer], layer_norm=norm)
    further = get_gpt_mtp_block_spec(cfg, upstream, False) if cfg.mtp_num_layers else None
    return GPTModel(
        cfg,
        block,
        mtp_block_spec=mtp_spec(further, block, cfg),
        vocab_size=vocabulary,
        max_sequence_length=1024,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    ).train()


def batch(sequence):
    torch.manual_seed(1)
    tokens, labels = (torch.randint(VOCABULARY, (BATCH, sequence)) for _ in range(2))
    weights = torch.randn(BATCH, sequence) * (torch.rand(BATCH, sequence) < 0.8)
    positions = torch.arange(sequence).expand(BATCH, -1)
    return dict(input_ids=tokens, position_ids=positions, attention_mask=None), labels, weights


def run(model, chunks, tokens=VOCABULARY, words=None):
    """Losses, gradients by name, and how often each parameter's hook ran; chunks None: stock.
    Labels are below `tokens`. The embedding works in `words` chunks; None: stock's."""
    sequence = LOCAL_TOKENS * dist.get_world_size()
    inputs, labels, weights = batch(sequence)
    labels %= tokens
    calls = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    handles = []
    for name, parameter in model.named_parameters():
        parameter.grad = None

        def count(_parameter, name=name):
            calls[name] += 1

        handles.append(parameter.register_post_accumulate_grad_hook(count))
    head = None if chunks is None else LossHead(chunks)
    mask = weights.ne(0).float()
    looked_up_by = None if words is None else LossHead(words)
    with predictions_by(head), embedding_by(looked_up_by, model):
        losses = model(**inputs, labels=labels, loss_mask=mask, output_processor=head)
    losses.backward(weights)
    for handle in handles:
        handle.remove()
    return losses.detach(), {n: p.grad for n, p in model.named_parameters()}, calls


def of_the_head(name, tied):
    return "word_embeddings" in name if tied else "output_layer" in name


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def equality():
    """Every model in every number of chunks against stock."""
    rows = []
    for dtype, tied, fusion, shards in MODELS:
        shards = shards and dist.get_world_size() > 1
        model = gpt(dtype, tied, cross_entropy_loss_fusion=fusion, sequence_parallel=shards)
        losses, grads, _ = run(model, None)
        for chunks in CHUNKS:
            got, ours, calls = run(model, chunks)
            (head,) = (name for name in grads if of_the_head(name, tied))
            rows.append(
                dict(
                    dtype=dtype,
                    tied=tied,
                    fusion=fusion,
                    shards=shards,
                    chunks=chunks,
                    same_losses=torch.equal(got, losses),
                    loss_error=relative(got, losses),
                    hidden_error=max(relative(ours[n], grads[n]) for n in grads if n != head),
                    others=[n for n in grads if n != head and not torch.equal(ours[n], grads[n])],
                    compared=len(grads) - 1,
                    same_head=torch.equal(ours[head], grads[head]),
                    head_error=relative(ours[head], grads[head]),
                    calls=sorted(set(calls.values())),
                )
            )
    return rows


def further_tokens():
    """Two further predictions in every number of chunks against stock: losses as logged, tokens
    predicted right, gradients; and the peak of each."""
    rows, vocabulary = [], 8192
    for tied in (False, True):
        shards = dist.get_world_size() > 1
        model = gpt("fp32", tied, vocabulary, mtp_num_layers=2, sequence_parallel=shards)
        with torch.no_grad():  # two tokens, on the first rank, stand out: some are predicted right
            others = (
                model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
            )
            others[2 if dist.get_rank() == 0 else 0 :] *= 0.01
        stock = None
        for chunks in (None, 1, 7):
            MTPLossLoggingHelper.tracker.clear()
            with StorageMeter(ignore=list(model.parameters())) as meter:
                losses, grads, calls = run(model, chunks, tokens=2)
            logged = {
                name: MTPLossLoggingHelper.tracker[name].tolist()
                for name in ("loss_values", "correct_values", "total_values")
            }
            stock = stock or (losses, grads, logged)
            rows.append(
                dict(
                    tied=tied,
                    chunks=chunks,
                    logged=logged,
                    same_losses=torch.equal(losses, stock[0]),
                    differing=[n for n in grads if not torch.equal(grads[n], stock[1][n])],
                    error=max(relative(grads[n], stock[1][n]) for n in grads if stock[1][n].any()),
                    calls=sorted(set(calls.values())),
                    peak=meter.peak_bytes,
                )
            )
    return rows


def fused_weight_gradient():
    """main_grad under --gradient-accumulation-fusion, and the flag that says so."""
    rows = []
    with scenarios.fused_wgrad():
        for dtype, tied in itertools.product(DTYPES, (False, True)):
            model = gpt(dtype, tied, gradient_accumulation_fusion=True)

            def main_grad(chunks, model=model, tied=tied):
                (head,) = (p for n, p in model.named_parameters() if of_the_head(n, tied))
                for parameter in model.parameters():
                    parameter.main_grad = torch.zeros(parameter.shape)
                    parameter.grad_added_to_main_grad = False
                    parameter.zero_out_wgrad = True
                _, _, calls = run(model, chunks)
                return head.main_grad, head.grad_added_to_main_grad, head.grad, calls

            stock, flag, dummy, _ = main_grad(None)
            for chunks in (1, 7):
                got, ours_flag, ours_dummy, calls = main_grad(chunks)
                rows.append(
                    dict(
                        dtype=dtype,
                        tied=tied,
                        chunks=chunks,
                        error=relative(got, stock),
                        flags=[flag, ours_flag],
                        same_rest=torch.equal(dummy, ours_dummy),
                        calls=sorted(set(calls.values())),
                    )
                )
    return rows


def peaks():
    """Bytes that the head alone needs, forward and backward, by chunks."""
    vocabulary, local = 8192, 512
    model = gpt("fp32", False, vocabulary)
    layer = model.output_layer
    hidden = torch.randn(local, 1, harness.HIDDEN, requires_grad=True)
    labels = torch.randint(vocabulary, (1, local * dist.get_world_size()))
    weights = torch.randn(labels.shape)

    def peak(chunks):
        hidden.grad = layer.weight.grad = None
        with StorageMeter(ignore=[hidden, layer.weight, labels, weights]) as meter:
            if chunks is None:
                logits, _ = layer(hidden)
                losses = model.compute_language_model_loss(labels, logits)
            else:
                losses = LossHead(chunks)(
                    hidden_states=hidden,
                    output_layer=layer,
                    output_weight=None,
                    labels=labels,
                    compute_language_model_loss=model.compute_language_model_loss,
                    scale_logits=model._scale_logits,
                )
            losses.backward(weights)
        return meter.peak_bytes

    fixed = 2 * layer.weight.nbytes + hidden.nbytes + 2 * weights.nbytes + 2 * labels.nbytes
    return dict(fixed=fixed, stock=peak(None), peaks={k: peak(k) for k in (1, 2, 4, 8)})


def evaluation():
    model = gpt("fp32", False).eval()
    inputs, labels, _ = batch(LOCAL_TOKENS * dist.get_world_size())
    with torch.no_grad():
        stock = model(**inputs, labels=labels)
        ours = model(**inputs, labels=labels, output_processor=LossHead(3))
    return dict(same=torch.equal(stock, ours), grad=ours.requires_grad)


def main(out, scenarios):
    """Runs the scenarios; rank 0 writes what each rank answered, by scenario, to the file `out`."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    answers = {}
    for scenario in scenarios:
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, scenario())
        answers[scenario.__name__] = gathered
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], (equality, further_tokens, fused_weight_gradient, peaks, evaluation))
