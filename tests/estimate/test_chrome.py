"""The trace that Perfetto opens."""

import itertools
import json
from dataclasses import replace

from megatron_memo.estimate.chrome import chrome_trace
from megatron_memo.estimate.cost import Costs
from megatron_memo.estimate.hardware import Machine, faster_link, gpu
from megatron_memo.estimate.strategies import Memo
from megatron_memo.estimate.timeline import simulate


def test_a_trace_loads_and_its_events_do_not_overlap_in_a_thread(small):
    job = replace(small, pp=2, micro_batches=3)
    machine = Machine(faster_link(gpu("a800"), 0.3))
    result = simulate(Costs(job, machine), Memo(0.5, chunks=4))
    trace = json.loads(json.dumps(chrome_trace(result), allow_nan=False))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == sum(len(stage.events) for stage in result.stages)
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    threads = {}
    for event in events:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert threads.keys() == names.keys()
    for own in threads.values():
        own.sort(key=lambda e: e["ts"])
        for one, following in itertools.pairwise(own):
            # Nanoseconds, as microseconds with three decimals.
            assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * following["ts"])
    last = max(e["ts"] + e["dur"] for e in events)
    assert abs(last - result.seconds * 1e6) < 0.01


def test_names_tell_layer_chunk_and_bytes(small):
    result = simulate(Costs(small, Machine(gpu("a800"))), Memo(0.5, chunks=4))
    events = [e for e in chrome_trace(result)["traceEvents"] if e["ph"] == "X"]
    compute = {e["name"] for e in events if e["cat"] == "compute"}
    assert "layer 3 chunk 1 forward of micro-batch 0: pre" in compute
    assert "layer 3 backward of micro-batch 0: attention backward" in compute
    copies = [e for e in events if e["cat"] == "D2H"]
    assert "layer 3: chunk 1, MLP" in {e["name"] for e in copies}
    for copy in copies:
        assert abs(copy["args"]["GB/s"] - 12.6) < 0.01
