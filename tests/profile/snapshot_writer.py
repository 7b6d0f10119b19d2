"""Memory snapshots without a GPU: the records that torch's allocator would have written.

Structure and order after torch 2.14.1: the dictionaries of torch/cuda/memory.py (`_snapshot`),
torch/csrc/cuda/Module.cpp (`THCPModule_memorySnapshot`) and the calls of `record_trace` in
c10/cuda/CUDACachingAllocator.cpp (sizes as asked for; a free is requested, then completed at once
unless another stream used the block).
"""

import pickle
from collections import deque

SEGMENT = 64 << 20
BASE = 0x7F0000000000
POOL = (0, 0)


def rounded(size):
    return max(512, -(-size // 512) * 512)


def frames(*places):
    """("train.py", 3, "step") -> a frame; innermost first, as torch has them."""
    return [{"filename": f, "line": line, "name": name} for f, line, name in places]


class Recorder:
    """One device: hands out addresses of one segment and writes down what happened."""

    def __init__(self, device=0, max_entries=None):
        self.device = device
        self.entries = deque(maxlen=max_entries)
        self.recording = True
        self.time = 0
        self.spare = {}  # rounded size -> addresses
        self.end = BASE
        self.blocks = {}  # address -> block of the segment, in order
        self.pending = []  # given up, still used by another stream
        self._record("segment_alloc", BASE, SEGMENT, 0)

    def malloc(self, size, stream=0, where=()):
        spare = self.spare.get(rounded(size))
        if spare:
            address = spare.pop()
        else:
            address, self.end = self.end, self.end + rounded(size)
        self.blocks[address] = {
            "address": address,
            "size": rounded(size),
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames(*where),
            "stream": stream,
        }
        self._record("alloc", address, size, stream, frames(*where))
        return address

    def free(self, address, used_elsewhere=False):
        block = self.blocks[address]
        self._record("free_requested", address, block["requested_size"], block["stream"])
        block["state"] = "active_pending_free"
        if used_elsewhere:
            self.pending.append(address)
        else:
            self._complete(address)

    def streams_are_done(self):
        while self.pending:
            self._complete(self.pending.pop(0))

    def out_of_memory(self, size):
        self._record("oom", 0, size, 0)
        entry = self.entries[-1]
        entry["device_free"] = entry.pop("addr")

    def segment(self):
        blocks = [{k: v for k, v in b.items() if k != "stream"} for b in self.blocks.values()]
        rest = {"address": self.end, "size": BASE + SEGMENT - self.end, "requested_size": 0}
        blocks.append({**rest, "state": "inactive", "frames": []})
        active = [b for b in blocks if b["state"].startswith("active")]
        allocated = [b for b in active if b["state"] == "active_allocated"]
        return {
            "device": self.device,
            "address": BASE,
            "total_size": SEGMENT,
            "allocated_size": sum(b["size"] for b in allocated),
            "active_size": sum(b["size"] for b in active),
            "requested_size": sum(b["requested_size"] for b in allocated),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _complete(self, address):
        block = self.blocks[address]
        self._record("free_completed", address, block["requested_size"], block["stream"])
        block["state"], block["frames"] = "inactive", []
        self.spare.setdefault(block["size"], []).append(address)

    def _record(self, action, address, size, stream, where=()):
        self.time += 7
        if self.recording:
            entry = {"action": action, "addr": address, "size": size, "stream": stream}
            more = {"time_us": self.time, "compile_context": "N/A", "user_metadata": ""}
            self.entries.append({**entry, **more, "frames": list(where), "pool_id": POOL})


def snapshot(*recorders, settings=()):
    histories = [[] for _ in range(max(r.device for r in recorders) + 1)]
    for recorder in recorders:
        histories[recorder.device] = list(recorder.entries)
    return {
        "segments": [recorder.segment() for recorder in recorders],
        "device_traces": histories,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "expandable_segments": False,
            "roundup_power2_divisions": {str(1 << k): 0 for k in range(16)},
            **dict(settings),
        },
        "external_annotations": [],
    }


def dump(path, *recorders, **more):
    """As torch.cuda.memory._dump_snapshot does."""
    with open(path, "wb") as file:
        pickle.dump(snapshot(*recorders, **more), file)
    return path
