"""What a config says that the estimate predicts is what the estimate predicts."""

import shutil
import sys

import pytest

from tests.scripts.shell import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import config_predictions
from config_predictions import block, stated, with_block
from lib.config import read_config
from lib.prediction import chosen_ratio, is_auto, predict

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
FOR_GPUS = [path for path in CONFIGS if is_auto(read_config(path))]
QUICK = [path for path in FOR_GPUS if path.stem.endswith("-1m")]


def name_of(path):
    return path.stem


@pytest.mark.parametrize("path", FOR_GPUS, ids=name_of)
def test_it_fits_and_says_what_the_estimate_says_today(path):
    text, config = path.read_text(), read_config(path)
    found = stated(text)
    assert found is not None, "python scripts/config_predictions.py writes it"
    said, ratio = found
    prediction = predict(config, ratio)
    assert prediction.answer.fits, prediction.answer.problems
    assert said == block(prediction), "python scripts/config_predictions.py writes it anew"
    assert text.index(said) < text.index("ENV_VARS:") and max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("path", QUICK, ids=name_of)
def test_the_ratio_is_the_one_that_the_estimate_chooses_for_auto(path):
    assert stated(path.read_text())[1] == chosen_ratio(read_config(path))


def test_all_but_the_quickstarts_config_are_for_gpus():
    assert [path.stem for path in CONFIGS if path not in FOR_GPUS] == ["quickstart"]


def test_writing_it_again_changes_nothing_else():
    text = (ROOT / "configs/gpt-7b-1m.yaml").read_text()
    said, _ = stated(text)
    other = said.replace("32", "33").replace("0.", "0.9")
    assert other != said
    assert with_block(text, other) != text
    assert with_block(with_block(text, other), said) == text
    bare = text.replace(said, "")
    assert stated(bare) is None and with_block(bare, said) == text


def test_a_config_that_is_out_of_date_is_named_and_one_that_does_not_fit_is_refused(
    tmp_path, capsys
):
    path = tmp_path / "model.yaml"
    shutil.copy(ROOT / "configs/gpt-7b-1m.yaml", path)
    assert config_predictions.main(["--check", str(path)]) == 0
    text = path.read_text()
    path.write_text(text.replace("--num-layers: 32", "--num-layers: 24"))
    assert config_predictions.main(["--check", str(path)]) == 1
    assert "out of date" in capsys.readouterr().err
    path.write_text(text.replace("--num-layers: 32", "--num-layers: 320"))
    before = path.read_text()
    assert config_predictions.main([str(path)]) == 1
    assert "does not fit: device:" in capsys.readouterr().err
    assert path.read_text() == before
