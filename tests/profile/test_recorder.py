"""The recorder follows storages: what is a request, when it ends, and what autograd would do."""

import torch

from megatron_memo import phases
from megatron_memo.ops import fused
from megatron_memo.ops.workspace import Workspace
from megatron_memo.phases import FORWARD, LAYER, Phase
from megatron_memo.profile.recorder import Recorder
from megatron_memo.profile.trace import Enter, Free, Malloc


def recorded(work, *, before=None, device="meta", **options):
    """Phases, events and held blocks of `work(made)`, with `made = before()` from outside."""
    recorder = Recorder(device, **options)
    with recorder.hearing(), recorder:
        made = before() if before is not None else None
        recorder.start()
        work(made)
        return recorder.stop()


def sizes(events):
    """+size of each request and -size of each end, in order."""
    asked = {event.id: event.size for event in events if isinstance(event, Malloc)}
    return [
        asked[e.id] if isinstance(e, Malloc) else -asked.get(e.id, 0)
        for e in events
        if not isinstance(e, Enter)
    ]


def empty(n):
    return torch.empty(n, dtype=torch.uint8, device="meta")


def test_views_and_changes_in_place_are_no_requests():
    def work(_):
        x = empty(100)
        y = x.view(10, 10)[2:].add_(1)
        del x
        z = y.t()
        del y, z

    assert sizes(recorded(work)[1]) == [100, -100]


def test_what_was_there_is_held_and_its_end_is_seen():
    def work(made):
        made.clear()

    _, events, held = recorded(work, before=lambda: [empty(100)])
    assert [block.size for block in held] == [100]
    assert events == [Free(held[0].id)]


def test_resized_storages_are_given_back_and_asked_for_anew():
    def work(_):
        x = empty(100)
        x.resize_(300)

    assert sizes(recorded(work)[1])[:3] == [100, -100, 300]


def test_storages_emptied_by_hand_are_given_back():
    def work(_):
        x = empty(100)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(100)
        del x

    assert sizes(recorded(work)[1]) == [100, -100, 100, -100]


def test_tensors_of_another_device_do_not_count():
    def work(_):
        torch.zeros(100)

    assert recorded(work)[1] == []


def test_a_tensor_made_unseen_is_a_request_where_it_is_used_first():
    def work(_):
        x = torch.tensor([1.0, 2.0], device="meta")
        x.add_(1)

    assert sizes(recorded(work)[1])[0] == 8


def test_only_what_outlives_a_fused_function_is_a_request():
    @fused.compile_as_region
    def double_and_more(x):
        return x * 2 + 1

    def work(_):
        double_and_more(empty(100))

    _, events, _ = recorded(work)
    assert [e.what for e in events if isinstance(e, Malloc)] == [
        "aten.empty.memory_format",
        "fused:double_and_more",
    ]


def test_workspaces_are_taken_while_the_results_are_there_and_given_back():
    def two(func, _args):
        mul = func is torch.ops.aten.mul.Tensor
        return [Workspace("a", 7), Workspace("b", 9)] if mul else []

    def work(_):
        x = empty(100)
        y = x * x
        del y

    _, events, _ = recorded(work, workspaces=two)
    assert sizes(events) == [100, 100, 7, 9, -7, -9, -100, -100]
    assert [e.what for e in events if isinstance(e, Malloc)][2:] == ["workspace:a", "workspace:b"]


def test_phases_are_noted_where_something_happens_in_them():
    first, second = Phase(LAYER, FORWARD, 0, 1), Phase(LAYER, FORWARD, 0, 2)

    def work(_):
        phases.enter(first)
        phases.enter(second)
        x = empty(8)
        phases.enter(first)
        del x

    found, events, _ = recorded(work)
    assert [found[e.phase] for e in events if isinstance(e, Enter)] == [second, first]
    assert [type(e) for e in events] == [Enter, Malloc, Enter, Free]


def requests_of_additions(build):
    """How many additions ask for memory in forward and backward of `build(h, w)`."""

    def work(_):
        x = torch.empty(64, 64, device="meta", requires_grad=True)
        w = torch.empty(64, 64, device="meta")
        given = torch.empty(64, 64, device="meta")
        build(x * 1, w).backward(given)

    events = recorded(work)[1]
    return [e.what for e in events if isinstance(e, Malloc)].count("aten.add.Tensor")


def test_gradients_of_which_autograd_owns_the_first_are_added_in_place():
    # Forward's addition; in backward two products meet at h.
    assert requests_of_additions(lambda h, w: (h @ w) + (h @ w)) == 1


def test_gradients_that_somebody_else_holds_are_added_out_of_place():
    # The gradient that was given reaches h first, and it is the caller's.
    assert requests_of_additions(lambda h, w: h + (h @ w)) == 2


def test_real_tensors_are_followed_alike():
    def work(_):
        x = torch.ones(100, dtype=torch.uint8)
        y = x + x
        del x, y

    assert sizes(recorded(work, device="cpu")[1]) == [100, 100, -100, -100]
