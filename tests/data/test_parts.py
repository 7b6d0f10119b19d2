"""The work cut into parts, and the pieces of text in one part."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_memo.data.parts import ReadOptions, Skip, Unit, cut, read_pieces
from megatron_memo.data.sources import Source, find_sources


def _source(path, data):
    path.write_bytes(data)
    return find_sources([str(path)])[0]


def _read(source, options=None):
    unit = Unit(0, 0, source.size)
    return list(read_pieces(source, unit, options or ReadOptions()))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=1, max_size=30),
    part_bytes=st.integers(1, 300),
)
def test_parts_cover_every_byte_once_in_order(sizes, part_bytes):
    sources = [
        Source(f"{n}.{'jsonl' if jsonl else 'txt'}", str(n), size, 0)
        for n, (size, jsonl) in enumerate(sizes)
    ]
    units = [unit for part in cut(sources, part_bytes) for unit in part]
    for index, source in enumerate(sources):
        ranges = [(unit.start, unit.end) for unit in units if unit.index == index]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == source.size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert len(ranges) == 1 or source.is_jsonl
    assert [unit.index for unit in units] == sorted(unit.index for unit in units)
    for part in cut(sources, part_bytes):
        assert len(part) == 1 or sum(unit.end - unit.start for unit in part) <= part_bytes


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1),
    part_bytes=st.integers(1, 200),
    last_newline=st.booleans(),
)
def test_every_line_belongs_to_exactly_one_range(tmp_path_factory, texts, part_bytes, last_newline):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    data = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    # JSON leaves U+0085 and its like as they are: only a newline ends a line.
    source = _source(path, data.encode() + b"\n" * last_newline)
    read = [
        piece
        for part in cut([source], part_bytes)
        for unit in part
        for piece in read_pieces(source, unit, ReadOptions())
    ]
    assert read == texts


def test_text_is_read_byte_for_byte(tmp_path):
    data = b"\xef\xbb\xbfa\r\nb\tc \xc3\xa9\n\n"
    assert [piece.encode() for piece in _read(_source(tmp_path / "a", data))] == [data]


def test_binary_and_empty_files_are_skipped_by_name(tmp_path):
    source = _source(tmp_path / "a.png", b"\x89PNG\r\n\0\0")
    assert _read(source) == [Skip(source.name, "binary", "it holds a zero byte")]
    source = _source(tmp_path / "b", b"")
    assert _read(source) == [Skip(source.name, "empty")]


def test_zero_bytes_are_text_in_utf_16(tmp_path):
    source = _source(tmp_path / "a", "héllo".encode("utf-16"))
    assert _read(source, ReadOptions(encoding="utf-16")) == ["héllo"]


def test_a_wrong_encoding_is_skipped_replaced_or_stops(tmp_path):
    source = _source(tmp_path / "a", b"caf\xe9!")
    detail = "byte 3 is not utf-8 (invalid continuation byte)"
    assert _read(source) == [Skip(source.name, "encoding", detail)]
    assert _read(source, ReadOptions(bad_encoding="replace")) == [
        Skip(source.name, "replaced", detail),
        "caf\ufffd!",
    ]
    with pytest.raises(ValueError, match=r"byte 3 is not utf-8.*--encoding.*--bad-encoding"):
        _read(source, ReadOptions(bad_encoding="stop"))
    assert _read(source, ReadOptions(encoding="latin-1")) == ["café!"]


def test_lines_without_a_text_are_skipped_with_their_place(tmp_path):
    lines = [b'{"text": "one"}', b"{broken", b"", b'{"body": "two"}', b'{"text": ""}', b"[1]"]
    source = _source(tmp_path / "a.jsonl", b"\n".join(lines))
    read = _read(source)
    assert read[0] == "one"
    assert [skip.why for skip in read[1:]] == ["json", "json", "empty", "json"]
    assert read[1].where == f"{source.name} at byte 16"
    assert _read(source, ReadOptions(text_key="body"))[2:3] == ["two"]


def test_half_a_surrogate_pair_in_json_is_replaced_and_said(tmp_path):
    source = _source(tmp_path / "a.jsonl", rb'{"text": "x\ud800y"}')
    skip, text = _read(source)
    assert (skip.why, text) == ("replaced", "x?y")
