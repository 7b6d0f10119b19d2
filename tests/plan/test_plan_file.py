"""Plan files: what is written comes back, and nothing damaged, edited or foreign is taken."""

import dataclasses
import hashlib
import json

import pytest

from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.plan_file import PlanError, digest_of, load_plan, read_plan, write_plan
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plan.verify_plan import WrongPlanError

QUICK = Search(time_limit=20, workers=1, use_cp_sat=False)


@pytest.fixture(scope="module")
def plan():
    sources = [
        Source("train", "11", training(Shape(3, 2, unit=1 << 22))),
        Source("eval", "22", training(Shape(3, 1, unit=1 << 20))),
    ]
    return make_plan(sources, QUICK).plan


@pytest.fixture
def path(plan, tmp_path):
    write_plan(tmp_path / "it.plan.jsonl", plan)
    return tmp_path / "it.plan.jsonl"


def sign(lines):
    """These lines with a right last line, as somebody who knows the format forges it."""
    text = "".join(line + "\n" for line in lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text + json.dumps(["end", len(lines), digest]) + "\n"


def test_what_is_written_comes_back(plan, path):
    assert load_plan(path) == plan
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_cut_file_is_refused_wherever_it_is_cut(path):
    data = path.read_bytes()
    for length in (0, 1, 100, len(data) // 2, len(data) - 70, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(PlanError, match=str(path)):
            load_plan(path)


def test_every_edited_digit_is_noticed(path):
    data = path.read_bytes()
    digits = [k for k, byte in enumerate(data) if chr(byte).isdigit()]
    for k in digits[:: len(digits) // 60]:
        other = b"1" if data[k : k + 1] != b"1" else b"2"
        path.write_bytes(data[:k] + other + data[k + 1 :])
        with pytest.raises(PlanError):
            load_plan(path)


def test_a_line_left_out_is_noticed(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:40] + lines[41:]) + "\n")
    with pytest.raises(PlanError, match="damaged"):
        load_plan(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no plan"),
        ("hello\n", "no plan"),
        ('{"format": "megatron-memo trace", "version": 1}\n', "no plan"),
        ('{"format": "megatron-memo plan", "version": 2}\n', "version 2 .* reads 1"),
    ],
)
def test_foreign_files_and_other_versions_are_refused_by_name(tmp_path, text, says):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(PlanError, match=says):
        load_plan(path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('["r",0,512,0,0]', "no line of a plan"),
        ('["r",0,512,0,0.5,1,2]', "offset is 0.5"),
        ('["r",99,512,0,0,1,2]', "phase 99"),
        ('["x"]', "out of place"),
        ("{}", "no line of a plan"),
        ("[", "no line of a plan"),
    ],
)
def test_lines_that_make_no_sense_are_named_even_when_signed(path, line, says):
    lines = path.read_text().splitlines()[:-1]
    path.write_text(sign([*lines, line]))
    with pytest.raises(PlanError, match=f"line {len(lines) + 1} .*{says}"):
        load_plan(path)


@pytest.mark.parametrize("change", [{"arena": "1"}, {"rounding": 0}, {"more": 1}, {"rank": None}])
def test_headers_that_make_no_sense_are_named_even_when_signed(path, change):
    lines = path.read_text().splitlines()[:-1]
    lines[0] = json.dumps({**json.loads(lines[0]), **change})
    path.write_text(sign(lines))
    with pytest.raises(PlanError, match="header does not fit"):
        read_plan(path)


def test_a_wrong_plan_is_not_written_and_not_loaded_when_signed(plan, path):
    wrong = dataclasses.replace(plan, arena=plan.arena + plan.rounding)
    with pytest.raises(WrongPlanError, match="arena"):
        write_plan(path.with_name("wrong"), wrong)
    assert not path.with_name("wrong").exists()
    lines = path.read_text().splitlines()[:-1]
    lines[0] = lines[0].replace(f'"arena":{plan.arena}', f'"arena":{wrong.arena}')
    path.write_text(sign(lines))
    with pytest.raises(PlanError, match="arena"):
        load_plan(path)


def test_an_unwritable_target_is_an_error_that_names_it(plan, tmp_path):
    with pytest.raises(PlanError, match=r"no.such.folder"):
        write_plan(tmp_path / "no such folder" / "x", plan)


def test_the_digest_is_that_of_the_bytes(path):
    assert digest_of(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_phase_that_is_none_is_refused_even_in_a_signed_file(path):
    lines = path.read_text().splitlines()[:-1]
    at = next(k for k, line in enumerate(lines) if line.startswith('["p"'))
    lines[at] = '["p",null,"",null,null,null,null]'
    path.write_text(sign(lines))
    with pytest.raises(PlanError, match=f"line {at + 1} is no line of a plan"):
        load_plan(path)
