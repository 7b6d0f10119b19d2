"""Reading and writing MiniMalloc's CSV files."""

import os

import pytest

from megatron_memo.plan import atomic_file
from megatron_memo.plan.minimalloc_csv import read_problem, write_solution
from megatron_memo.plan.problem import Buffer, Problem, ProblemError

BROKEN = {
    "empty file": ("", "is empty"),
    "header only": ("id,lower,upper,size\n", "no buffers below"),
    "blank lines only": ("id,lower,upper,size\n\n , ,,\n", "no buffers below"),
    "missing column": ("id,lower,upper\n1,0,1\n", "no column size"),
    "no header": ("0,0,1,5\n", "no column id, lower, upper, size"),
    "column twice": ("id,lower,upper,size,size\n1,0,1,5,5\n", "size occurs twice"),
    "fraction": ("id,lower,upper,size\n1,0,1,5.5\n", "line 2: size must be an integer, not '5.5'"),
    "exponent": ("id,lower,upper,size\n1,0,1,1e6\n", "must be an integer"),
    "word": ("id,lower,upper,size\n1,zero,1,5\n", "lower must be an integer, not 'zero'"),
    "nothing": ("id,lower,upper,size\n1,0,,5\n", "upper must be an integer, not ''"),
    "underscore": ("id,lower,upper,size\n1,0,1,1_000\n", "must be an integer"),
    "negative size": ("id,lower,upper,size\n1,0,1,-5\n", "size is -5"),
    "zero size": ("id,lower,upper,size\n1,0,1,0\n", "line 2: buffer '1': size is 0"),
    "negative time": ("id,lower,upper,size\n1,-1,1,5\n", "negative"),
    "no life": ("id,lower,upper,size\n1,0,1,5\n2,3,3,5\n", "line 3: buffer '2': lower 3"),
    "backwards": ("id,lower,upper,size\n1,4,3,5\n", "must come before upper"),
    "twice": ("id,lower,upper,size\n1,0,1,5\n1,1,2,5\n", "line 3: id '1' was used in line 2"),
    "no id": ("id,lower,upper,size\n,0,1,5\n", "the id is missing"),
    "short row": ("id,lower,upper,size\n1,0,1\n", "3 values for 4 columns"),
    "long row": ("id,lower,upper,size\n1,0,1,5,6\n", "5 values for 4 columns"),
    "beyond doubles": (f"id,lower,upper,size\n1,0,1,{2**53 + 1}\n", "beyond 9007199254740992"),
    "absurd": (f"id,lower,upper,size\n1,0,1,{'9' * 6000}\n", "beyond"),
    "alignment": ("id,lower,upper,size,alignment\n1,0,1,5,64\n", "alignment is not supported"),
    "gaps": ("id,lower,upper,size,gaps\n1,0,9,5,3-4\n", "gaps is not supported"),
    "nul": ("id,lower,upper,size\n1,0,1,\0\n", "must be an integer|not a CSV"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_in_one_line_that_names_the_file(tmp_path, name):
    text, says = BROKEN[name]
    path = tmp_path / "in.csv"
    path.write_text(text)
    with pytest.raises(ProblemError, match=says) as caught:
        read_problem(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_what_is_not_text_is_refused(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b"id,lower,upper,size\n\xff\xfe\x00,0,1,2\n")
    with pytest.raises(ProblemError, match="not a text file"):
        read_problem(path)


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ProblemError, match="No such file"):
        read_problem(tmp_path / "none.csv")
    with pytest.raises(ProblemError, match="directory"):
        read_problem(tmp_path)


def test_columns_come_in_any_order_with_spaces_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("\ufeffsize, id ,upper,note,lower\r\n5, a,3,hello,1\r\n\r\n", encoding="utf-8")
    assert read_problem(path).buffers == (Buffer("a", 1, 3, 5),)


def test_a_solution_reads_back_as_the_problem(tmp_path):
    problem = Problem((Buffer("a", 0, 2, 3), Buffer("b,c", 1, 4, 5)))
    path = tmp_path / "out.csv"
    write_solution(path, problem, [5, 0])
    assert path.read_text() == 'id,lower,upper,size,offset\na,0,2,3,5\n"b,c",1,4,5,0\n'
    assert read_problem(path) == problem


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    path.write_text("before")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(atomic_file.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_solution(path, Problem((Buffer("a", 0, 2, 3),)), [0])
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.csv"]
