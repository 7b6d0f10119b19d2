"""How much of what a datasheet promises real work reaches: the cost model's only free numbers.

NOTE: where the defaults are from
---------------------------------
Published numbers that they are calibrated on (`paper.derive`, which a test holds the defaults to):

* the MEMO paper, 7B model on 8 A800: swapping everything hides behind a layer's forward from 192K
  tokens on, and attention is more than 90% of a layer's forward from 576K on. Together with the
  bandwidth of two GPUs that share a PCI Express link they give `attention_forward` and
  `tp_hidden`.
* FlashAttention-2 (arXiv 2307.08691): at most 63% of an A100's rate backward and 73% forward. Only
  their quotient is used, for `attention_backward`.

Priors, that is round numbers usual for large and well shaped work, which nothing here was
calibrated on: `gemm`, `memory`, `nvlink`, `network`. Predictions, and so what tells whether all of
this is worth anything: the paper's MFU at 1M tokens, its 65B model, the longest contexts
(tests/estimate/test_paper.py).

All of this is of A800s. On newer GPUs the same shares presume the attention kernels made for them
(FlashAttention-3 or cuDNN's on Hopper, FlashAttention-4 on Blackwell); older ones reach half of
them or less there, and only a calibration by a run of one's own tells.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT, VERSION = "megatron-memo calibration", 1


@dataclass(frozen=True)
class Calibration:
    """Shares of the specified rates, from 0 to 1 unless said otherwise.

    Attributes:
        gemm: of the dense rate, for matrix products whose tiles fill the GPU.
        attention_forward, attention_backward: of the dense rate, for flash attention; operations
            counted as half of the square, backward as 2.5 times forward.
        memory: of the bandwidth of device memory.
        nvlink, network: of the links between GPUs of a node, and between nodes.
        tp_hidden: of the tensor-parallel communication in forward, with --tp-comm-overlap.
        d2h, h2d: of the host link's achieved bandwidth (`Gpu.host_bandwidth`); may be above 1.
        source: what the numbers are from, in words.
    """

    gemm: float = 0.75
    attention_forward: float = 0.661
    attention_backward: float = 0.570
    memory: float = 0.80
    nvlink: float = 0.80
    network: float = 0.80
    tp_hidden: float = 0.462
    d2h: float = 1.0
    h2d: float = 1.0
    source: str = "the MEMO paper's crossover points, FlashAttention-2's rates, usual values"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} {value!r}: must be a number.")
            low_enough = value <= 1 or name in ("d2h", "h2d")
            if not low_enough or not (value > 0 or (name == "tp_hidden" and value == 0)):
                raise ValueError(f"{name} {value}: a share must be above 0 and at most 1.")


_NUMBERS = tuple(f.name for f in dataclasses.fields(Calibration) if f.name != "source")


def write(path: Path, calibration: Calibration, measured_on: dict[str, Any]) -> None:
    """Writes a calibration file.

    Args:
        path: the file.
        calibration: the numbers.
        measured_on: plain values by name that say what run they are from.
    """
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "efficiencies": dataclasses.asdict(calibration),
        "measured_on": measured_on,
    }
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Calibration, dict[str, Any]]:
    """The numbers of a calibration file, and what run they are from.

    Raises:
        ValueError: not there, no calibration, of another version, or a number out of range.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: this is no JSON file, and no calibration") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"{path}: this is no calibration; `megatron-memo calibrate` makes one")
    if whole.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {whole.get('version')} of the format, this program reads {VERSION}"
        )
    numbers = whole.get("efficiencies")
    known = {f.name for f in dataclasses.fields(Calibration)}
    if not isinstance(numbers, dict) or not numbers.keys() <= known:
        odd = sorted(numbers.keys() - known) if isinstance(numbers, dict) else ["efficiencies"]
        raise ValueError(f"{path}: {', '.join(map(str, odd))}: not known to a calibration")
    try:
        return Calibration(**numbers), dict(whole.get("measured_on") or {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
