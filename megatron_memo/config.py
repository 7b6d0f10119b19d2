"""What the user asked of memo, as one frozen value that everything else reads."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# The layer reads these when it is reached through `--spec` from a script that does not know the
# memo flags (see megatron_memo.layer.spec.memo_layer_spec).
ENV_RATIO = "MEMO_SWAP_RATIO"
ENV_CHUNKS = "MEMO_CHUNKS"
ENV_RESIDENT = "MEMO_RESIDENT_LAYERS"
ENV_DEPTH = "MEMO_PREFETCH_DEPTH"
ENV_SYNC = "MEMO_SYNC"
ENV_POISON = "MEMO_POISON"
ENV_EXPERTS = "MEMO_MOE_EXPERTS"

DEFAULT_RATIO = 0.5
# What `--memo-swap-ratio auto` begins with: fits if anything does.
PROVISIONAL_RATIO = 0.0
DEFAULT_RESIDENT_LAYERS = 2
DEPTH_WORDS = ("auto", "layers")


@dataclass(frozen=True)
class HostSettings:
    """Where swapped activations go, on one rank.

    Attributes:
        budget: bytes of host memory; None for no limit.
        nvme_path: folder for what host memory cannot hold; None for nowhere.
        nvme_budget: bytes of disk that it may take there; given with `nvme_path`.
        need: bytes that the run moves at most at a time; 0 if nobody worked it out.
        spill: of these, bytes for which there is disk only.
    """

    budget: int | None = None
    nvme_path: str | None = None
    nvme_budget: int | None = None
    need: int = 0
    spill: int = 0


class Experts(StrEnum):
    """What happens to what a mixture of experts saves between forward and backward."""

    KEEP = "keep"  # stays on the device
    SWAP = "swap"  # to host memory and back
    RECOMPUTE = "recompute"  # the experts' inputs as under SWAP, the rest is computed again


@dataclass(frozen=True)
class MemoConfig:
    """Token-wise swap and recompute of one training run (MEMO, section 4.1).

    Attributes:
        swap_ratio: alpha, the fraction (0..1) of each sequence's tokens, from its start, whose
            saved activations go to host memory. Those of the other tokens are recomputed.
            Each layer's input and its attention output go to host memory whatever alpha is.
        chunks: token chunks a layer works in; None lets `layer.chunks` choose.
        resident_layers: the last layers of the model whose activations stay on the device.
        sync: every copy is waited for at once (debugging: takes away all overlap).
        poison: device buffers are filled with NaN when they are given up (debugging: makes a
            read of released memory visible in the loss).
        min_swap_bytes: storages smaller than this stay on the device; moving them costs more
            than it frees.
        link_bandwidth: bytes a second that copies have in each direction on a machine without a
            GPU, for experiments; None for what the machine gives.
        host: what holds them meanwhile; worked out once the model is known.
        prefetch_depth: how many steps (a chunk's half of a layer, or the attention) a swapped
            tensor stays on the device after it was made, and comes back before it is read; "auto"
            and "layers": see `layer.depth`.
        moe_experts: for layers with a mixture of experts. Their attention goes by `swap_ratio`.
    """

    swap_ratio: float
    chunks: int | None = None
    resident_layers: int = DEFAULT_RESIDENT_LAYERS
    sync: bool = False
    poison: bool = False
    min_swap_bytes: int = 1 << 16
    link_bandwidth: int | None = None
    host: HostSettings = HostSettings()
    prefetch_depth: int | str = "auto"
    moe_experts: Experts = Experts.SWAP

    def __post_init__(self) -> None:
        if not 0.0 <= self.swap_ratio <= 1.0:  # also catches NaN
            raise ValueError(
                f"--memo-swap-ratio {self.swap_ratio}: must be a number from 0 (recompute every "
                "token) to 1 (swap every token). Give for example --memo-swap-ratio 0.5."
            )
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(
                f"--memo-chunks {self.chunks}: must be at least 1. Leave the flag out to let memo "
                "choose."
            )
        if self.resident_layers < 0:
            raise ValueError(
                f"--memo-resident-layers {self.resident_layers}: must be 0 or more. 0 keeps no "
                "layer on the device and saves the most memory."
            )
        depth = self.prefetch_depth
        if depth not in DEPTH_WORDS and not (isinstance(depth, int) and depth >= 1):
            raise ValueError(
                f"--memo-prefetch-depth {depth}: must be a whole number from 1, auto or layers. "
                "1 needs the least device memory; layers, as in the MEMO paper, the most."
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "MemoConfig":
        """Settings for `--spec megatron_memo.layer.spec memo_layer_spec`, from MEMO_* variables.

        Raises:
            ValueError: a variable that is set does not parse or is out of range.
        """
        env = os.environ if env is None else env
        return cls(
            swap_ratio=_number(env, ENV_RATIO, float, DEFAULT_RATIO),
            chunks=_number(env, ENV_CHUNKS, int, None),
            resident_layers=_number(env, ENV_RESIDENT, int, DEFAULT_RESIDENT_LAYERS),
            sync=_number(env, ENV_SYNC, int, 0) != 0,
            poison=_number(env, ENV_POISON, int, 0) != 0,
            prefetch_depth=depth_from_text(env.get(ENV_DEPTH) or "auto"),
            moe_experts=_experts(env.get(ENV_EXPERTS, "")),
        )


def depth_from_text(text: str) -> int | str:
    """A prefetch depth as it is given; `MemoConfig` refuses what is none."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class PlanSettings:
    """Where device memory comes from.

    Attributes:
        plan: "off" (PyTorch's allocator), "auto" (a plan from the run's own requests), or the path
            of a plan or of a folder of plans.
        budget: bytes, or None for no limit.
    """

    plan: str = "off"
    budget: int | None = None

    @property
    def wanted(self) -> bool:
        """Anything at all is asked for."""
        return self.plan != "off" or self.budget is not None


def _experts(text: str) -> Experts:
    names = [policy.value for policy in Experts]
    if text and text not in names:
        raise ValueError(
            f"environment variable {ENV_EXPERTS}={text!r}: must be one of {', '.join(names)}. "
            "Unset it to use the default."
        )
    return Experts(text or Experts.SWAP)


def _number(env, name, kind, default):
    text = env.get(name, "")
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise ValueError(
            f"environment variable {name}={text!r}: must be {what}. Unset it to use the default."
        ) from None
