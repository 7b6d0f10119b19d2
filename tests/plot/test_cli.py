"""`megatron-memo plot`, as it is typed."""

import subprocess
import sys

import pytest

from megatron_memo.cli import main
from megatron_memo.plot.page import DATA_TYPE

MACHINE = ["--gpus-per-node", "2", "--host-memory", "64GiB"]


@pytest.mark.parametrize("kind", ["layout", "memory"])
@pytest.mark.parametrize("name", ["out.png", "out.svg", "out.html"])
def test_a_plan_is_drawn_in_every_format(kind, name, planned, tmp_path, capsys):
    out = tmp_path / name
    files = [str(planned.plan_file), str(planned.trace_file)]
    assert main(["plot", kind, *files, "-o", str(out), "--theme", "dark"]) == 0
    assert out.stat().st_size > 5000
    said = capsys.readouterr().out
    assert "it.trace.jsonl.gz" in said and f"written to {out}" in said


@pytest.mark.parametrize("kind", ["streams", "pareto", "curve"])
def test_an_estimate_is_drawn(kind, flags, tmp_path, capsys):
    out = tmp_path / "out.svg"
    more = ["--lengths", "16K,32K"] if kind == "curve" else []
    assert main(["plot", kind, *MACHINE, *more, "-o", str(out), "--", *flags]) == 0
    assert out.read_text("utf-8").lstrip().startswith("<?xml")
    assert "written to" in capsys.readouterr().out


def test_all_is_one_page_of_five_figures(planned, flags, tmp_path):
    out = tmp_path / "all.html"
    given = [str(planned.plan_file), *MACHINE, "--lengths", "16K", "-o", str(out)]
    assert main(["plot", "all", *given, "--", *flags]) == 0
    assert out.read_text("utf-8").count(f'type="{DATA_TYPE}"') == 5


def mistaken(*words):
    return subprocess.run(
        [sys.executable, "-m", "megatron_memo.cli", "plot", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def refusal(capsys, *words):
    """What is said of a command line that is refused."""
    assert main(["plot", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-memo: error: ") and said.count("\n") == 1
    return said


def test_a_file_of_the_wrong_kind_is_named(planned, tmp_path, capsys):
    out = tmp_path / "out.html"
    said = refusal(capsys, "layout", planned.trace_file, "-o", out)
    assert str(planned.trace_file) in said and "this is no plan" in said
    said = refusal(capsys, "layout", planned.plan_file, planned.plan_file, "-o", out)
    assert "this is no trace" in said
    assert not out.exists()


def test_the_trace_of_another_plan_is_refused(planned, other_trace, tmp_path, capsys):
    said = refusal(capsys, "layout", planned.plan_file, other_trace, "-o", tmp_path / "out.html")
    assert f"{other_trace}: is not the trace of {planned.plan_file}" in said


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    said = refusal(capsys, "memory", tmp_path / "none.jsonl", "-o", tmp_path / "out.html")
    assert "none.jsonl: No such file" in said


@pytest.mark.parametrize(
    ("kind", "name", "wanted"),
    [("layout", "out.pdf", ".png or .svg or .html"), ("all", "out.png", "ends in .html")],
)
def test_a_format_that_is_not_drawn_is_refused(kind, name, wanted, planned, tmp_path, capsys):
    assert wanted in refusal(capsys, kind, planned.plan_file, "-o", tmp_path / name)


def test_a_figure_does_not_replace_the_plan(planned, capsys):
    plan = planned.plan_file
    assert "names the input itself" in refusal(capsys, "layout", plan, "-o", plan)


def test_nothing_to_draw_is_told(tmp_path, capsys):
    out = tmp_path / "out.html"
    assert "give a PLAN, the flags" in refusal(capsys, "all", "-o", out)
    assert "no flags of a training run" in refusal(capsys, "curve", "-o", out)


def test_flags_beside_a_plan_are_refused_where_they_change_nothing(planned, tmp_path, capsys):
    given = ["layout", planned.plan_file, "-o", tmp_path / "out.html", "--", "--num-layers", "2"]
    assert "plot all" in refusal(capsys, *given)


def test_an_option_of_what_is_not_drawn_is_refused(planned, flags, tmp_path, capsys):
    out = tmp_path / "out.html"
    said = refusal(capsys, "all", planned.plan_file, "-o", out, "--lengths", "1K")
    assert "--lengths 1K: is of an estimate, and no flags" in said
    said = refusal(capsys, "all", "-o", out, "--window", "0", "--", *flags)
    assert "--window 0: is of a plan, and none is given" in said


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--lengths", "1K..zz", "--lengths 1K..zz: 'zz' is no number of tokens"),
        ("--reserve", "much", "--reserve much: must be a size"),
        ("--gpu", "a8000", "--gpu a8000: not in the table"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(flag, value, wanted, flags, tmp_path, capsys):
    out = tmp_path / "out.html"
    assert wanted in refusal(capsys, "curve", "-o", out, *MACHINE, flag, value, "--", *flags)


def test_an_unknown_kind_lists_those_there_are():
    done = mistaken("pie", "-o", "out.png")
    assert done.returncode == 2
    for kind in ("layout", "memory", "streams", "pareto", "curve", "all"):
        assert kind in done.stderr
    assert "Traceback" not in done.stderr
