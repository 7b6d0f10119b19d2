"""Training at planned addresses: recorded, planned and replayed in a run, saved, refused."""

import json
import stat
from pathlib import Path

import pytest

from megatron_memo.platform import is_active

pytestmark = pytest.mark.skipif(not is_active(), reason="runs on the CPU platform")

LAUNCHER = str(Path(__file__).resolve().parents[2] / "pretrain_gpt_memo.py")
STEPS, SAVED, REPLAYED_FROM = 10, 8, 5
FLAGS = [
    *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--train-iters", str(STEPS)),
    *("--memo-swap-ratio", "0.5", "--memo-resident-layers", "0", "--hidden-dropout", "0.1"),
]
# A model of which not every layer is resident.
ONE_RANK = ["--num-layers", "3", "--memo-swap-ratio", "0.5", "--train-iters", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def native(train):
    return train(2, "llama", *FLAGS)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="module")
def planned(train, folder, traced):
    """Evaluation after iterations 5 and 10, a checkpoint after 8: both lie between steps."""
    saving = ("--save", str(folder), "--save-interval", str(SAVED))
    enough = ("--memo-device-budget", "1GiB")
    tracing = ("--memo-trace", str(traced))
    return train(2, "llama", *FLAGS, "--memo-plan", "auto", *saving, *enough, *tracing)


@pytest.fixture(scope="module")
def resumed(train, planned, folder):
    loading = ("--load", str(folder), "--ckpt-step", str(SAVED))
    return train(2, "llama", *FLAGS, "--memo-plan", "auto", *loading)


def rows(run):
    """What the allocator counted in each step, by iteration."""
    return {row["iteration"]: row for row in run.report["plan"]["steps"]}


def test_numbers_are_bitwise_those_without_a_plan(native, planned):
    assert list(planned.losses) == list(range(1, STEPS + 1))
    assert planned.losses == native.losses
    assert planned.logged == native.logged
    assert planned.validation == native.validation


def test_the_run_leaves_a_page_that_says_what_it_did(planned, folder):
    page = folder / "memo_plan" / "report.html"
    told = [line for line in planned.out.splitlines() if str(page) in line]
    assert len(told) == 1
    text = page.read_text("utf-8")
    assert f"Iterations 1 to {STEPS}, " in text
    for said in ("arena", "needed, by the bill", "What memo said", "memory plan in use"):
        assert said in text
    assert text.count('class="figure"') == 2  # the run's course, the plan


def test_the_traced_iteration_has_compute_by_layer_and_the_copies_of_the_step(planned, traced):
    content = json.loads(traced.read_text())
    assert content["otherData"]["iteration"] == 10
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    compute = {event["name"] for event in events if event["cat"] == "compute"}
    assert "layer 1 chunk 0 forward of micro-batch 3: forward" in compute
    assert "head backward of micro-batch 0: backward" in compute
    assert any(name.endswith(": again") for name in compute)
    moved = {
        way: sum(event["args"]["bytes"] for event in events if event["cat"] == way)
        for way in ("D2H", "H2D")
    }
    swapped = planned.report["swap"]
    assert moved["D2H"] * STEPS == swapped["d2h_bytes"]
    assert moved["H2D"] * STEPS == swapped["h2d_bytes"]


def test_from_the_fifth_iteration_on_every_planned_request_is_served_at_its_address(planned):
    for iteration, row in rows(planned).items():
        if iteration < REPLAYED_FROM:
            assert row["hits"] == 0
            continue
        assert row["hits"] == row["requests"] - row["native_entries"] > 100, row
        assert row["miss_unknown"] == row["miss_occupied"] == row["unknown_frees"] == 0, row


def test_on_one_rank_the_native_allocator_serves_nothing_but_what_outlives_the_iteration(train):
    alone = train(1, "gpt", *ONE_RANK, "--memo-plan", "auto")
    for iteration, row in rows(alone).items():
        if iteration >= REPLAYED_FROM:
            assert row["hits"] > 100
            assert row["native_mallocs"] == row["native_entries"] < 20, row


def test_on_two_ranks_it_serves_what_gloo_asks_for_besides(planned):
    for iteration, row in rows(planned).items():
        if iteration >= REPLAYED_FROM:
            by_gloo = row["native_mallocs"] - row["native_entries"]
            assert 0 < by_gloo <= row["miss_thread"] + row["outside"], row


def test_the_arena_is_as_large_as_the_plan_and_used_nearly_to_its_end(planned):
    """Not to its end: the recorded iteration may have had a collective's late free at its peak."""
    plan = planned.report["plan"]
    assert plan["replayed"] and plan["arena_bytes"] == plan["lower_bound"]
    for iteration, row in rows(planned).items():
        if iteration >= REPLAYED_FROM:
            assert row["arena_size"] == plan["arena_bytes"]
            assert 0.9 * plan["arena_bytes"] <= row["arena_peak"] <= plan["arena_bytes"], row


def test_one_line_says_that_the_plan_is_in_use(planned, native):
    assert planned.out.count("memory plan in use") == 1
    assert "proven to be the least" in planned.out
    assert "memory plan" not in native.out
    assert native.report["plan"] is None


def test_a_resumed_run_begins_with_the_saved_plan_and_repeats_the_numbers(planned, resumed):
    later = {i: loss for i, loss in planned.losses.items() if i > SAVED}
    assert resumed.losses == later
    last = rows(resumed)[STEPS]
    assert last["hits"] == last["requests"] - last["native_entries"] > 100
    assert rows(resumed)[SAVED + 1]["hits"] == 0  # its first step allocates for good


def test_a_plan_of_another_model_is_refused_by_name_before_the_first_iteration(
    attempt, tiny, folder, planned
):
    flags = [word if word != "0.5" else "0.25" for word in FLAGS]
    refused = attempt(2, LAUNCHER, *tiny, *flags, "--memo-plan", str(folder / "memo_plan"))
    assert refused.status != 0
    assert refused.err.count("megatron-memo: error:") == 1
    assert "rank 0: --memo-plan" in refused.err and "rank 1: --memo-plan" in refused.err
    assert "memo swap ratio is 0.5 there and 0.25 here" in refused.err
    assert "iteration        1/" not in refused.out


def test_a_rank_without_a_compiler_ends_a_run_that_asked_for_a_plan(attempt, tiny, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    script = tmp_path / "start.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1':\n"
        f"    os.environ['CXX'] = {str(compiler)!r}\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    refused = attempt(2, str(script), LAUNCHER, *tiny, *FLAGS, "--memo-plan", "auto")
    assert refused.status != 0
    assert "the planned allocator can't be built" in refused.err


def test_a_budget_too_small_ends_in_an_out_of_memory_error_that_names_the_holders(attempt, tiny):
    refused = attempt(1, LAUNCHER, *tiny, "--train-iters", "2", "--memo-device-budget", "1MiB")
    assert refused.status != 0
    assert "OutOfMemoryError" in refused.err
    assert "device budget" in refused.err
