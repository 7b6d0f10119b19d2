"""Which files are read, and in which order."""

import os

import pytest

from megatron_memo.data.sources import find_sources


def _make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def _names(*args, **kwargs):
    return [source.name for source in find_sources(*args, **kwargs)]


def test_files_come_sorted_and_folders_stay_together(tmp_path):
    _make(tmp_path, "b/2.py", "a.py", "b/1.py", "b/c/0.py", "z.py")
    assert _names([str(tmp_path)]) == ["a.py", "z.py", "b/1.py", "b/2.py", "b/c/0.py"]


def test_inputs_keep_the_order_given_and_a_file_counts_once(tmp_path):
    _make(tmp_path, "x/1.py", "y/2.py")
    second = str(tmp_path / "y")
    assert _names([second, str(tmp_path)]) == ["2.py", "x/1.py"]


def test_suffixes_filter_folders_but_not_files_named_themselves(tmp_path):
    _make(tmp_path, "f/a.py", "f/b.txt", "c.txt")
    given = str(tmp_path / "c.txt")
    assert _names([str(tmp_path / "f"), given], suffixes=[".py"]) == ["a.py", given]


def test_excludes_match_names_folders_and_paths(tmp_path):
    _make(tmp_path, "site-packages/p.py", "lib/test/t.py", "lib/l.py", "lib/skip.py", "k.py")
    excludes = ["site-packages", "lib/test", "skip.*"]
    assert _names([str(tmp_path)], excludes=excludes) == ["k.py", "lib/l.py"]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    _make(tmp_path, ".git/config", ".env", "a.txt")
    assert _names([str(tmp_path)]) == ["a.txt"]


def test_a_circle_of_links_ends(tmp_path):
    _make(tmp_path, "f/a.txt")
    os.symlink(tmp_path, tmp_path / "f" / "up")
    assert _names([str(tmp_path)]) == ["f/a.txt"]


def test_the_output_of_an_earlier_run_is_not_input(tmp_path):
    _make(tmp_path, "a.txt", "out.bin", "out.idx", "out.json", "out.parts/000000.json")
    assert _names([str(tmp_path)], output_prefix=str(tmp_path / "out")) == ["a.txt"]


def test_a_missing_input_is_named(tmp_path):
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"--input {missing} does not exist"):
        find_sources([missing])


def test_filters_that_leave_nothing_are_named(tmp_path):
    _make(tmp_path, "a.txt")
    with pytest.raises(ValueError, match=r"no file to read with --suffix \.py --exclude x"):
        find_sources([str(tmp_path)], suffixes=[".py"], excludes=["x"])
