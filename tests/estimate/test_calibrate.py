"""A measured run corrects the efficiencies, and the estimate then meets it."""

import argparse
import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from megatron_memo import cli
from megatron_memo.config import MemoConfig
from megatron_memo.estimate import calibrate
from megatron_memo.estimate.calibration import read
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.flags import Run
from megatron_memo.estimate.hardware import Machine, gpu
from megatron_memo.estimate.job import Job
from megatron_memo.estimate.strategies import FullRecompute, Memo, Stock
from megatron_memo.estimate.timeline import simulate

REPORT = Path("report.json")


def costs_of(job, name="a800-80g"):
    return Costs(job, Machine(gpu(name), gpus=2))


def measured(job, seconds, waits=None, **other):
    known = {"job": asdict(job), "memo": None, "recompute": None, "device": "NVIDIA A800"}
    return calibrate.Measured(seconds=seconds, waits=waits or {}, **(known | other))


@pytest.mark.parametrize("factor", [0.9, 1.0, 3.0, 500.0])
def test_the_simulated_step_then_takes_as_long_as_the_measured(small, factor):
    costs = costs_of(small)
    wanted = factor * simulate(costs, Stock()).seconds
    found = calibrate.calibrated(costs, Stock(), measured(small, wanted))
    again = simulate(Costs(small, costs.machine, found), Stock()).seconds
    assert again == pytest.approx(wanted, rel=1e-3)
    assert found.gemm / costs.efficiency.gemm == pytest.approx(
        found.attention_backward / costs.efficiency.attention_backward
    )
    assert (found.d2h, found.nvlink) == (costs.efficiency.d2h, costs.efficiency.nvlink)


def test_measured_waits_slow_the_links(small):
    small = replace(small, layers=3)
    costs, strategy = costs_of(small), Memo(ratio=1.0, resident=0)
    slower = replace(costs.efficiency, gemm=0.6, d2h=0.03, h2d=0.02, source="made up")
    run = simulate(Costs(small, costs.machine, slower), strategy)
    waits = {name: run.exposed[name] for name in ("D2H", "H2D")}
    assert min(waits.values()) > 0.05 * run.seconds
    found = calibrate.calibrated(costs, strategy, measured(small, run.seconds, waits))
    again = simulate(Costs(small, costs.machine, found), strategy)
    assert again.seconds == pytest.approx(run.seconds, rel=0.02)
    for name, wait in waits.items():
        assert again.exposed[name] == pytest.approx(wait, rel=0.1)
    assert found.d2h < 0.2 and found.h2d < 0.2


def test_a_run_faster_than_the_datasheet_is_refused(small):
    costs = costs_of(small)
    seconds = simulate(costs, Stock()).seconds / 100
    with pytest.raises(ValueError, match=r"less than the .* a800-80g would need at its full rate"):
        calibrate.calibrated(costs, Stock(), measured(small, seconds))


def run_of(job, memo=None, strategy=None):
    return Run((), job, strategy or Stock(), memo, False, None)


@pytest.mark.parametrize(
    ("change", "run", "part"),
    [
        ({}, {"job": {"hidden": 2048}}, "--hidden-size is 4096 there and 2048 here"),
        ({}, {"job": {"sequence": 65536}}, "--seq-length is 32768 there and 65536 here"),
        ({}, {"memo": MemoConfig(0.5)}, "--memo-swap-ratio is given here and not there"),
        ({}, {"strategy": FullRecompute()}, "--recompute-granularity is off there and full here"),
        ({"memo": asdict(MemoConfig(0.5))}, {}, "--memo-swap-ratio is given there and not here"),
        (
            {"memo": asdict(MemoConfig(0.5))},
            {"memo": MemoConfig(0.25)},
            "--memo-swap-ratio is 0.5 there and 0.25 here",
        ),
    ],
)
def test_a_report_of_another_run_is_refused(small, change, run, part):
    job = replace(small, **run.pop("job", {}))
    with pytest.raises(ValueError, match="report is of another run") as refused:
        calibrate.same_run(REPORT, measured(small, 1.0, **change), run_of(job, **run))
    assert part in str(refused.value)


def test_the_report_of_the_same_run_is_taken(small):
    calibrate.same_run(REPORT, measured(small, 1.0), run_of(small))
    memo = MemoConfig(0.5)
    taken = measured(small, 1.0, memo=asdict(memo))
    calibrate.same_run(REPORT, taken, run_of(small, memo))


def test_what_the_machine_or_a_lone_rank_decides_is_taken_from_the_report(small):
    ran = replace(small, saved_rope=128, overlap_p2p=True, fused_activation=False, cp_kind="a2a")
    found = calibrate.same_run(REPORT, measured(ran, 1.0), run_of(small))
    assert found.job == ran
    piped = replace(small, pp=2, overlap_p2p=True)
    with pytest.raises(
        ValueError, match=r"--no-overlap-p2p-communication .* is on there and off here"
    ):
        calibrate.same_run(REPORT, measured(piped, 1.0), run_of(replace(small, pp=2)))


def test_every_field_of_a_job_has_a_flag_that_megatron_knows():
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = set(parser._option_string_actions)
    for field in fields(Job):
        words = [word for word in calibrate.flag_of(field.name).split() if word[:2] == "--"]
        own = {"--nodes", "--gpus-per-node"}
        unknown = [word for word in words if word.strip("(),") not in known | own]
        assert not unknown or field.name in ("saved_rope", "fused_activation"), unknown


def test_a_calibration_is_of_one_gpu_and_one_models_widths(small):
    known = {"gpu": "a800-80g", "job": asdict(small)}
    longer = replace(small, layers=16, sequence=1 << 20, tp=4)
    calibrate.check_measured_on(REPORT, known, longer, "a800-80g")
    with pytest.raises(ValueError, match="is of a800-80g, and --gpu is h100-80g"):
        calibrate.check_measured_on(REPORT, known, longer, "h100-80g")
    wider = replace(small, ffn=11264)
    with pytest.raises(
        ValueError, match="another model: --ffn-hidden-size is 16384 there and 11264 here"
    ):
        calibrate.check_measured_on(REPORT, known, wider, "a800-80g")


# ---- the quickstart's model on CPU cores


def report_of(path, job, **change):
    steps = [{"iteration": n, "seconds": 5.0 + n, "metered": n == 4} for n in (1, 2, 3, 4)]
    known = {"job": job, "memo": None, "recompute": None, "swap": None, "device": "cpu"}
    path.write_text(json.dumps(known | {"iterations": steps} | change))


def test_calibrate_and_estimate_as_commands(quickstart, small, tmp_path, capsys):
    report, out = tmp_path / "report.json", tmp_path / "cpu.json"
    machine = ["--gpu", "cpu", "--gpus-per-node", "2", "--host-memory", "8GiB"]

    def command(*words):
        status = cli.main([*words, *machine, "--", *quickstart])
        said = capsys.readouterr()
        return status, said.out + said.err

    from megatron_memo.estimate.flags import read_run

    report_of(report, asdict(read_run(quickstart, 2).job))
    status, said = command("calibrate", str(report), "-o", str(out))
    assert status == 0, said
    assert "measured 7.5 s an iteration" in said and "and 7.5 s now" in said
    assert "  gemm: 0.75 -> " in said and f"written to {out}" in said
    assert read(out)[1]["gpu"] == "cpu"

    status, said = command("estimate", "--quick", "--calibration", str(out))
    assert status == 0, said
    assert "7.5 s" in said

    report_of(report, asdict(small))
    status, said = command("calibrate", str(report), "-o", str(out))
    assert (
        status == 2 and "the report is of another run: --num-layers is 8 there and 5 here" in said
    )
    report_of(report, asdict(small), device="NVIDIA A800-SXM4-80GB")
    status, said = command("calibrate", str(report), "-o", str(out))
    assert status == 2 and "was measured on NVIDIA A800-SXM4-80GB" in said
    report.write_text("[]")
    assert command("calibrate", str(report), "-o", str(out))[0] == 2


def test_calibrated_on_stock_alone_the_ranking_of_the_quickstart_is_that_of_the_readme(
    quickstart, tmp_path
):
    """Stock, memo at 1, memo at 0.5 and 0, full recompute: README's table, from its first row."""
    from megatron_memo.estimate.flags import read_run

    job = read_run(quickstart, 2).job
    costs = costs_of(job, "cpu")
    found = calibrate.calibrated(costs, Stock(), measured(job, 5.53, device="cpu"))
    there = Costs(job, costs.machine, found)
    memo = [Memo(ratio=ratio, resident=0) for ratio in (1.0, 0.5, 0.0)]
    stock, full, *swapped = (
        simulate(there, way).seconds for way in (Stock(), FullRecompute(), *memo)
    )
    assert stock <= swapped[0] < swapped[1] < full
    assert stock < swapped[2] < full
