"""Megatron's embedding, whole and in chunks, on every rank of a torchrun; answers as JSON.

torchrun --nproc-per-node 2 embedding_worker.py OUT.json
"""

import sys
from contextlib import nullcontext

import loss_worker  # first: it activates the platform before anything imports Megatron
import torch
import torch.distributed as dist
from loss_worker import BATCH, CHUNKS, DTYPES, LOCAL_TOKENS, VOCABULARY, gpt, relative
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import nn

from megatron_memo.profile.storage import StorageMeter
from megatron_memo.training.embedding import embedding_by
from megatron_memo.training.loss_head import LossHead

# (type, positions, sequence parallelism at tp 2, deterministic mode)
MODULES = (
    ("fp32", "rope", True, False),
    ("fp32", "rope", True, True),
    ("fp32", "learned_absolute", True, False),
    ("fp32", "rope", False, False),
    ("bf16", "rope", True, False),
    ("bf16", "learned_absolute", False, False),
)


class Model(nn.Module):
    """An embedding where a GPT has it, in a wrapper as Megatron's."""

    def __init__(self, cfg, vocabulary, positions):
        super().__init__()
        self.module = nn.Module()
        self.module.embedding = LanguageModelEmbedding(cfg, vocabulary, 1024, positions)

    def forward(self, chunks, *inputs):
        with nullcontext() if chunks is None else embedding_by(LossHead(chunks), self):
            return self.module.embedding(*inputs)


def model(dtype, positions="rope", vocabulary=VOCABULARY, **other):
    cfg = loss_worker.harness.config("llama", layers=1, dtype=DTYPES[dtype], **other)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    return Model(cfg, vocabulary, positions).train()


def ids(sequence, batch=BATCH, vocabulary=VOCABULARY):
    torch.manual_seed(1)
    return torch.randint(vocabulary, (batch, sequence)), torch.arange(sequence).expand(batch, -1)


def run(built, chunks, inputs, gradient=None):
    """Values, gradients by name, and how often a hook of each parameter ran."""
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    calls = dict.fromkeys((name for name, _ in built.named_parameters()), 0)
    handles = []
    for name, parameter in built.named_parameters():
        parameter.grad = None

        def count(_parameter, name=name):
            calls[name] += 1

        handles.append(parameter.register_post_accumulate_grad_hook(count))
    values = built(chunks, *inputs)
    if gradient is not None:
        values.backward(gradient)
    for handle in handles:
        handle.remove()
    return values.detach(), {n: p.grad for n, p in built.named_parameters()}, calls


def exact(words, tokens, gradient):
    """The weight's gradient in fp64, the same sum of absolute values, and how many terms each."""
    if gradient.shape[0] < tokens.shape[1]:  # a rank has its stretch
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        gradient = torch.cat(parts)
    here = gradient.double().flatten(0, 1)  # [s * b, h]
    at = tokens.t().flatten()
    shape = (words.num_embeddings, here.shape[1])
    sums = [torch.zeros(shape, dtype=torch.float64).index_add(0, at, g) for g in (here, here.abs())]
    terms = torch.bincount(at, minlength=words.num_embeddings)[:, None]
    shard = slice(words.vocab_start_index, words.vocab_end_index)
    return sums[0][shard], sums[1][shard], terms[shard]


def modules():
    """The module by itself, dropout after it, in every number of chunks against stock's."""
    rows = []
    for dtype, positions, shards, fixed_order in MODULES:
        shards = shards and dist.get_world_size() > 1
        other = dict(dropout=0.1, sequence_parallel=shards, deterministic_mode=fixed_order)
        built = model(dtype, positions, **other)
        inputs = ids(LOCAL_TOKENS * dist.get_world_size())
        stock, _, _ = run(built, None, inputs)
        torch.manual_seed(3 + dist.get_rank() * shards)
        gradient = torch.randn(stock.shape).to(stock.dtype)
        _, wanted, _ = run(built, None, inputs, gradient)
        words = built.module.embedding.word_embeddings
        # What dropout let through, as stock's backward sees it.
        passed = gradient * (stock != 0) / 0.9
        sums = exact(words, inputs[0], passed)
        (name,) = (n for n in wanted if "word_embeddings" in n)
        for chunks in CHUNKS:
            values, grads, calls = run(built, chunks, inputs, gradient)
            unit = torch.finfo(DTYPES[dtype]).eps / 2
            true, absolute, terms = sums
            # Every term is rounded by dropout's scale, every addition, and the sum once more.
            limit = 1.01 * (terms + 2) * unit * absolute
            rows.append(
                dict(
                    dtype=dtype,
                    positions=positions,
                    shards=shards,
                    chunks=chunks,
                    same_values=torch.equal(values, stock),
                    same_words=torch.equal(grads[name], wanted[name]),
                    within=bool(((grads[name].double() - true).abs() <= limit).all()),
                    beyond=bool(((grads[name].double() * 1.1 - true).abs() <= limit).all()),
                    others=[n for n in grads if n != name and not torch.equal(grads[n], wanted[n])],
                    calls=sorted(set(calls.values())),
                    left=[key for key in ("forward", "weight") if key in words.__dict__],
                )
            )
    return rows


def models():
    """A whole GPT, its loss in chunks too, against stock: tied and not, with further tokens."""
    rows = []
    for tied, further in ((False, 0), (True, 0), (False, 2), (True, 2)):
        shards = dist.get_world_size() > 1
        more = dict(mtp_num_layers=further) if further else {}
        built = gpt("fp32", tied, sequence_parallel=shards, **more)
        losses, grads, _ = loss_worker.run(built, None)
        (name,) = (n for n in grads if "word_embeddings" in n)
        for head, words in ((None, 7), (7, 7)):
            got, ours, calls = loss_worker.run(built, head, words=words)
            ends = {name, "output_layer.weight"}
            rows.append(
                dict(
                    tied=tied,
                    further=further,
                    head=head,
                    same_losses=torch.equal(got, losses),
                    same_words=torch.equal(ours[name], grads[name]),
                    error=relative(ours[name], grads[name]),
                    others=[
                        n for n in grads if n not in ends and not torch.equal(ours[n], grads[n])
                    ],
                    calls=sorted(set(calls.values())),
                )
            )
    return rows


def peaks():
    """Bytes of the embedding alone, forward and backward, by chunks."""
    local = 512
    built = model("bf16", vocabulary=32)
    inputs = ids(local * dist.get_world_size(), 1, 32)
    gradient = torch.randn(local, 1, loss_worker.harness.HIDDEN).to(DTYPES["bf16"])
    found = {}
    for chunks in (None, 2, 8):
        with StorageMeter(ignore=[gradient, *inputs, *built.parameters()]) as meter:
            run(built, chunks, inputs, gradient)
        found[str(chunks)] = meter.peak_bytes
    return dict(local=gradient.nbytes, found=found)


def one_word():
    """A bf16 gradient of ones for a text of one word, a token a chunk."""
    local = 512
    built = model("bf16")
    tokens, positions = ids(local * dist.get_world_size(), 1)
    gradient = torch.ones(local, 1, loss_worker.harness.HIDDEN).to(DTYPES["bf16"])
    _, grads, _ = run(built, local, (torch.zeros_like(tokens), positions), gradient)
    (found,) = grads.values()
    return dict(first=found[0].unique().tolist(), rest=bool(found[1:].any()))


def without_gradients():
    """An embedding that is not trained, and a pass without gradients."""
    built = model("bf16")
    inputs = ids(LOCAL_TOKENS * dist.get_world_size())
    stock, _, _ = run(built, None, inputs)
    with torch.no_grad():
        evaluated = built(7, *inputs)
    built.requires_grad_(False)
    frozen = built(7, *inputs)
    return dict(
        same=torch.equal(stock, evaluated) and torch.equal(stock, frozen),
        wants=[evaluated.requires_grad, frozen.requires_grad],
    )


if __name__ == "__main__":
    scenarios = (modules, models, peaks, one_word, without_gradients)
    loss_worker.main(sys.argv[1], scenarios)
