"""``megatron-memo profile`` as a user starts it."""

import sys
from argparse import Namespace

import pytest

from megatron_memo import cli
from megatron_memo.profile import session
from megatron_memo.profile.trace import Malloc, read_trace

BIG = """
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
    --seq-length 1048576 --max-position-embeddings 1048576 --position-embedding-type rope
    --tensor-model-parallel-size 8 --sequence-parallel --bf16 --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --tokenizer-type NullTokenizer
    --vocab-size 50256 --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --memo-swap-ratio 0.3 --data-path /nowhere/at/all --save /nowhere/either
"""
GIB = 2**30


@pytest.fixture
def profile(start, tmp_path):
    """``profile(*words)``: status and output of the command, in a folder of its own."""

    def run(*words):
        command = [sys.executable, "-m", "megatron_memo.cli", "profile", "-o", str(tmp_path)]
        process = start(*command, *words)
        said, _ = process.communicate(timeout=280)
        return process.returncode, said

    return run


def test_a_million_tokens_fit_without_data_or_gpu(profile, tmp_path):
    status, said = profile("--rank", "0", "--", *BIG.split())
    assert status == 0, said
    assert [line for line in said.splitlines() if "Megatron" in line] == []
    assert "rank 0 of 8 (stage 0" in said and "of kind A" in said
    trace = read_trace(tmp_path / "rank-0.trace.jsonl.gz")
    assert trace.header.device == "cuda" and trace.header.iteration == 2
    assert trace.header.same_ranks == (0,)
    assert trace.header.fingerprint["memo swap_ratio"] == 0.3
    # One unit is b*s*h/tp elements of bf16: 1 GiB. The attention's gradient needs two in fp32.
    accumulator = [e.size for e in trace.events if isinstance(e, Malloc) and "fp32 dq" in e.what]
    assert set(accumulator) == {2 * GIB} and len(accumulator) == 4
    assert 30 * GIB < trace.peak() < 90 * GIB
    assert trace.header.fingerprint["loss chunks"] > 1


def test_ranks_that_ask_for_the_same_share_a_trace_and_iterations_are_alike(
    profile, tmp_path, flags
):
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    words = [*flags["llama-memo"], *layout.split(), "--num-layers", "4"]
    status, said = profile("--check", "--world-size", "8", "--", *words)
    assert status == 0, said
    traces = [read_trace(path) for path in tmp_path.glob("*.trace.jsonl.gz")]
    assert sorted(trace.header.same_ranks for trace in traces) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    stages = {trace.header.fingerprint["pipeline stage"] for trace in traces}
    assert stages == {0, 1}
    assert {phase.layer for phase in traces[0].phases} - {None} in ({1, 2}, {3, 4})


def test_ranks_that_share_a_sequence_show_what_their_trades_take(profile, tmp_path, flags):
    status, said = profile("--", *flags["llama-memo"], "--context-parallel-size", "2")
    assert status == 0, said
    (path,) = tmp_path.glob("*.trace.jsonl.gz")
    trace = read_trace(path)
    assert trace.header.same_ranks == (0, 1)
    assert trace.header.fingerprint["context_parallel_size"] == 2
    assert trace.header.fingerprint["cp_comm_type"] == "a2a"
    asked = [e for e in trace.events if isinstance(e, Malloc)]
    first = next(i for i, e in enumerate(asked) if "attention" in e.what)
    # Before its first kernel q, k and v are each packed for the other rank, received and ordered.
    # Half of 256 tokens, of 4 query and 2 key heads of 16 fp32 elements.
    one = 128 * 16 * 4
    steps = ("aten.clone.default", "aten.empty_like.default", "aten.cat.default")
    expected = [(step, heads * one) for heads in (4, 2, 2) for step in steps]
    # The kernel has every key head: they are repeated after that, for k and for v.
    assert [(e.what, e.size) for e in asked[first - 11 : first - 2]] == expected


def mistake(words, capsys):
    assert cli.main(["profile", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-memo: error: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no flags of a training run"),
        (["--rank", "9", "--", "--bf16"], "--rank 9: the run has 1 ranks"),
        (["--rank", "x", "--", "--bf16"], "--rank x: must be a whole number"),
        (
            ["--world-size", "6", "--", "--tensor-model-parallel-size", "4"],
            "--world-size 6: does not divide by 4",
        ),
        (["--", "--tensor-model-parallel-size", "two"], "must be a whole number"),
    ],
)
def test_mistakes_in_the_layout_are_told_at_once(words, part, capsys):
    assert part in mistake(words, capsys)


def test_mistakes_in_the_flags_are_megatrons_or_ours_in_one_line(profile, flags):
    for change, part in (
        (["--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine"),
        (["--memo-swap-ratoi", "0.5"], "Did you mean --memo-swap-ratio?"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--global-batch-size", "0"], "Megatron refuses these flags"),
        (["--num-experts", "4"], "--num-experts 4: how many tokens an expert gets depends on"),
    ):
        status, said = profile("--", *flags["gpt-stock"], *change)
        assert status == 2 and part in said and "Traceback" not in said, said
        assert said.count("\n") == 1, said


@pytest.mark.parametrize("flag", ["sft", "dataloader_inter_document_masking"])
def test_packed_sequences_whose_lengths_are_data_are_refused_by_flag(flag):
    with pytest.raises(ValueError, match=rf"--{flag.replace('_', '-')}: .* a profile has no data"):
        session._check_pack(Namespace(**{flag: True}))
    session._check_pack(Namespace(**{flag: False}))


def test_experts_can_be_profiled_where_all_get_as_many_tokens():
    padded = Namespace(num_experts=4, moe_pad_expert_input_to_capacity=True)
    session._check_experts(padded)
    with pytest.raises(ValueError, match="add --moe-token-dispatcher-type alltoall --moe-expert"):
        session._check_experts(Namespace(num_experts=4, moe_pad_expert_input_to_capacity=False))


def test_a_middle_stage_with_more_micro_batches_than_stages_is_found_regular(profile, flags):
    """Its first micro-batches meet others in flight, its last ones do not."""
    layout = "--pipeline-model-parallel-size 4 --num-layers 12 --global-batch-size 8"
    status, said = profile("--rank", "1", "--", *flags["gpt-memo"], *layout.split())
    assert status == 0, said
    assert "rank 1 of 4 (stage 1)" in said
