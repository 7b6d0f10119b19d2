"""The command line of a run, and what `megatron-memo estimate` makes of it."""

import json

import pytest

from megatron_memo import cli
from megatron_memo.estimate.flags import read_run, with_flag, without_flag
from megatron_memo.estimate.strategies import FineGrainedOffload, FullRecompute, Stock

_SHAPE = """
    --num-layers 4 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 32768 --max-position-embeddings 32768 --position-embedding-type rope
    --tensor-model-parallel-size 4 --sequence-parallel --bf16 --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --tokenizer-type NullTokenizer
    --vocab-size 50256 --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --data-path /nowhere/at/all
"""
SHAPE = _SHAPE.split()
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_OFFLOAD = "--fine-grained-activation-offloading --offload-modules attn_norm core_attn"


def test_the_flags_say_job_and_strategy():
    run = read_run([*SHAPE, *_FULL.split()], world_size=8)
    assert (run.job.tp, run.job.dp, run.job.micro_batches) == (4, 2, 2)
    assert run.job.vocabulary == 50688 and run.memo is None
    assert run.strategy == FullRecompute()
    assert read_run(SHAPE, 8).strategy == Stock()
    run = read_run([*SHAPE, *_OFFLOAD.split()], 8)
    assert run.strategy == FineGrainedOffload(("attn_norm", "core_attn"))


def test_a_ratio_of_auto_is_left_to_be_chosen():
    run = read_run([*SHAPE, "--memo-swap-ratio", "auto", "--memo-chunks", "8"], 8)
    assert run.auto and run.memo.chunks == 8
    run = read_run([*SHAPE, "--memo-swap-ratio=0.25"], 8)
    assert not run.auto and run.memo.swap_ratio == 0.25


def test_flags_are_set_in_either_spelling():
    assert with_flag(["--a", "1", "--b=2", "--c"], "--b", "3") == ["--a", "1", "--c", "--b", "3"]
    assert without_flag(["--a", "1", "--ab", "2"], "--a") == ["--ab", "2"]


def mistake(capsys, *words):
    status = cli.main(["estimate", *words])
    out, said = capsys.readouterr()
    assert out == ""
    assert status == 2 and said.startswith("megatron-memo: error: "), said
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("options", "flags", "part"),
    [
        ([], [], "no flags of a training run"),
        (["--gpu", "a800-81g"], SHAPE, "--gpu a800-81g: not in the table. Nearest: a800-80g"),
        (["--host-memory=-1"], SHAPE, "--host-memory -1: must be a size"),
        (["--reserve", "much"], SHAPE, "--reserve much: must be a size"),
        (["--gpus-per-node", "6"], SHAPE, "the number of GPUs 6: does not divide by"),
        ([], [*SHAPE, "--num-attention-heads", "14"], "--num-attention-heads 14: does not divide"),
        ([], [*SHAPE, "--memo-swap-ratoi", "1"], "Did you mean --memo-swap-ratio?"),
        (
            [],
            [*SHAPE, "--group-query-attention", "--num-query-groups", "5"],
            "--num-query-groups 5: does not divide --num-attention-heads 16. Use one that does, "
            "such as 4 or 8.",
        ),
        (
            [],
            [*SHAPE, "--num-experts", "4", "--moe-router-topk", "8"],
            "--moe-router-topk 8: more than the 4 experts of --num-experts",
        ),
        (
            [],
            [*SHAPE, "--memo-swap-ratio", "auto", "--memo-resident-layers", "4"],
            "--memo-resident-layers 4: all 4 layers stay on the device",
        ),
        ([], [*SHAPE, "--num-experts", "4"], "Add --quick before --"),
        ([], [*SHAPE, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        ([], [*SHAPE, "--recompute-granularity", "selective"], "the estimate knows full"),
        (
            ["--quick"],
            [*SHAPE, "--memo-swap-ratio", "0.5", "--memo-chunks", "9999"],
            "--memo-chunks 9999",
        ),
        (["--sweep", "width"], SHAPE, "--sweep width: can go over seq-length"),
        (["--sweep", "seq-length=101"], SHAPE, "rank 101: does not divide by"),
        (["--sweep", ""], SHAPE, "--sweep : can go over seq-length"),
        (["--sweep", "seq-length="], SHAPE, "--sweep seq-length=: no lengths follow"),
        (["--sweep", "seq-length=64K,101"], SHAPE, "rank 101: does not divide by"),
        (["--sweep", "seq-length", "--search"], SHAPE, "give one of the two"),
        (["--trace", "t.json", "--search"], SHAPE, "--trace: shows one iteration"),
        (["--json", "/nowhere/at/all.json"], SHAPE, "the folder /nowhere/at does not exist"),
        (["--calibration", "/nowhere.json"], SHAPE, "/nowhere.json: No such file"),
        (["--gpu", "cpu"], SHAPE, "Measure a run and give --calibration FILE"),
    ],
)
def test_mistakes_are_told_in_one_line(options, flags, part, capsys):
    assert part in mistake(capsys, *options, "--", *flags)


def test_a_quick_estimate_shows_every_way_and_what_to_change(capsys, tmp_path):
    numbers, trace = tmp_path / "numbers.json", tmp_path / "trace.json"
    options = ["--quick", "--json", str(numbers), "--trace", str(trace)]
    assert cli.main(["estimate", *options, "--", *SHAPE, "--memo-swap-ratio", "auto"]) == 0
    said = capsys.readouterr().out
    for words in ("stock", "full recompute", "fine-grained offload", "MFU full", "MFU causal"):
        assert words in said
    for part in ("weights", "gradients", "optimizer", "skeletals", "transients", "head", "buffers"):
        assert f"  {part}" in said
    assert "MFU = 3 x (linear + head + attention) / (seconds x GPUs x dense rate)" in said
    content = json.loads(numbers.read_text())
    assert content["own"].startswith("memo") and len(content["ways"]) == 4
    assert len(content["changes"]) <= 3 and content["job"]["dp"] == 2
    assert {"name", "ph", "pid"} <= set(json.loads(trace.read_text())["traceEvents"][0])


def test_a_sweep_and_a_search_list_what_fits(capsys):
    assert cli.main(["estimate", "--sweep", "seq-length=16K..64K", "--", *SHAPE]) == 0
    said = capsys.readouterr().out
    assert said.count("full recompute") == 3 + 1 and "longest of these that fits, memo" in said
    assert cli.main(["estimate", "--search", "--", *SHAPE]) == 0
    said = capsys.readouterr().out
    assert "that were tried fit" in said and "tp 4, pp 1, cp 1, dp 2" in said
