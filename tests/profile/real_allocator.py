"""A training iteration on the CPU: what its real allocator was asked for, as a trace.

``python real_allocator.py OUT KERNELS FLAGS...``. No dispatch mode is active: torch's profiler
notes each call of the allocator, with the operators around it. `what` of a request is their names,
innermost first, joined by " < ". Blocks that one of KERNELS (names joined by commas) takes and
gives back inside of itself are left out, and so are blocks that were there before the window.
"""

import gc
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megatron_memo import platform
from megatron_memo.phases import START
from megatron_memo.profile.trace import Free, Malloc, write_trace


class RealAllocator:
    """`Recorder`'s window over torch's profiler."""

    def __init__(self, kernels):
        self._kernels = kernels

    def start(self):
        gc.collect()
        gc.disable()
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def stop(self):
        self._profiler.stop()
        calls = []
        results = self._profiler.profiler.kineto_results
        waiting = [(event, ()) for event in results.experimental_event_tree()]
        while waiting:
            event, above = waiting.pop()
            waiting += [(child, (event, *above)) for child in event.children]
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                calls.append((event.start_time_ns, fields.ptr, fields.alloc_size, above))
        calls.sort(key=lambda call: call[0])
        inside = self._inside(calls)
        events, ids = [], {}
        for number, (_, address, size, above) in enumerate(calls):
            if number in inside:
                continue
            if size > 0:
                ids[address] = number
                events.append(Malloc(number, size, 0, " < ".join(e.name for e in above)))
            elif address in ids:
                events.append(Free(ids.pop(address)))
        return [START], events, []

    def _inside(self, calls):
        """Calls by which a kernel takes a block and gives it back."""
        found, open_ = set(), {}
        for number, (_, address, size, above) in enumerate(calls):
            kernels = {id(event) for event in above if event.name in self._kernels}
            if size > 0:
                open_[address] = number, kernels
            elif address in open_:
                begin, own = open_.pop(address)
                if own & kernels:
                    found |= {begin, number}
        return found


def main():
    out, kernels, words = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    platform.activate()
    from megatron_memo.profile.session import Session, pretrain
    from megatron_memo.profile.words import profiled_words

    sys.argv = [sys.argv[0], *profiled_words(words)]
    session = Session(RealAllocator(kernels), "cpu", 1, lambda _words: None)
    pretrain(session, on_cuda=False)
    write_trace(out, session.windows[0])


if __name__ == "__main__":
    main()
