"""Efficiencies: derived, written, read, refused."""

import json
from dataclasses import replace

import pytest

from megatron_memo.estimate import calibration, paper
from megatron_memo.estimate.calibration import Calibration


def test_the_defaults_are_what_the_paper_s_crossover_points_give():
    derived = paper.derive()
    for name in ("attention_forward", "attention_backward", "tp_hidden"):
        assert getattr(Calibration(), name) == pytest.approx(getattr(derived, name), abs=6e-4)


def test_deriving_meets_the_numbers_that_it_derives_from_whatever_the_priors():
    for prior in (Calibration(), Calibration(gemm=0.7, memory=0.7), Calibration(nvlink=0.7)):
        derived = paper.derive(prior)
        assert paper.swap_hides_from(derived) == pytest.approx(paper.SWAP_HIDES_FROM, rel=0.01)
        dominates = paper.attention_dominates_from(derived)
        assert dominates == pytest.approx(paper.ATTENTION_SHARE_FROM, rel=0.01)


def test_a_file_gives_back_what_was_written(tmp_path):
    mine = replace(Calibration(), gemm=0.6, d2h=1.2, source="a run of mine")
    calibration.write(tmp_path / "c.json", mine, {"layers": 32})
    assert calibration.read(tmp_path / "c.json") == (mine, {"layers": 32})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format": "else"}, "no calibration"),
        ({"version": 9}, "version 9 of the format, this program reads 1"),
        ({"efficiencies": {"gemms": 0.5}}, "gemms: not known"),
        ({"efficiencies": {"gemm": 1.5}}, "gemm 1.5: a share must be above 0 and at most 1"),
        ({"efficiencies": {"h2d": 0}}, "h2d 0"),
        ({"efficiencies": {"gemm": "fast"}}, "gemm 'fast': must be a number"),
        ({"efficiencies": {"gemm": float("nan")}}, "gemm nan"),
    ],
)
def test_files_that_are_no_calibration_are_refused_by_name(tmp_path, change, part):
    path = tmp_path / "c.json"
    calibration.write(path, Calibration(), {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=part) as refused:
        calibration.read(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        calibration.read(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON file"):
        calibration.read(tmp_path / "c.json")
