"""The verifier against a plain comparison of all pairs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memo.plan.verify import LayoutError, verify_layout

LAYOUTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 14)),
    min_size=1,
    max_size=9,
)


def check(layout, **more):
    lower = [start for start, _, _, _ in layout]
    upper = [start + life for start, life, _, _ in layout]
    ids = [f"b{k}" for k in range(len(layout))]
    return verify_layout(
        ids, lower, upper, [s for *_, s, _ in layout], [o for *_, o in layout], **more
    )


@given(LAYOUTS)
def test_a_layout_passes_exactly_when_no_pair_overlaps(layout):
    clash = any(
        a[0] < b[0] + b[1] and b[0] < a[0] + a[1] and a[3] < b[3] + b[2] and b[3] < a[3] + a[2]
        for k, a in enumerate(layout)
        for b in layout[:k]
    )
    if clash:
        with pytest.raises(LayoutError, match="overlap at time"):
            check(layout)
    else:
        seen = check(layout)
        assert seen.peak == max(offset + size for *_, size, offset in layout)
        assert seen.most_alive <= seen.peak


@pytest.mark.parametrize(
    ("layout", "more", "says"),
    [
        ([(0, 2, 4, -1)], {}, "negative offset"),
        ([(0, 2, 4, 1)], {"capacity": 4}, "above the capacity 4"),
        ([(0, 2, 4, 6)], {"alignment": 4}, "no multiple of 4"),
        ([(0, 2, 4, None)], {}, "no integer offset"),
        ([(0, 2, 4, 1.0)], {}, "no integer offset"),
        ([(0, 2, 4, True)], {}, "no integer offset"),
        ([(3, 0, 4, 0)], {}, "before it begins"),
        ([(3, -2, 4, 0)], {}, "before it begins"),
    ],
)
def test_what_is_wrong_is_named(layout, more, says):
    with pytest.raises(LayoutError, match=says):
        check(layout, **more)


def test_a_missing_offset_is_noticed():
    with pytest.raises(LayoutError, match="1 offsets for 2 buffers"):
        verify_layout(["a", "b"], [0, 0], [1, 1], [1, 1], [0])


def test_numbers_beyond_64_bits_are_compared_exactly():
    big = 2**80
    assert check([(0, 1, big, 0), (0, 1, 1, big)]).peak == big + 1
    with pytest.raises(LayoutError, match="overlap"):
        check([(0, 1, big, 0), (0, 1, 1, big - 1)])
