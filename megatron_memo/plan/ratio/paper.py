"""MEMO's own program (arXiv 2407.12117, section 4.2): the largest ratio that hides and fits."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_memo.sizes import size_words

from .problem import NoRoom


@dataclass(frozen=True)
class PaperChoice:
    """The ratio, and what keeps it from being larger: "host memory", "D2H" or "none"."""

    ratio: float
    binds: str


def paper_program(
    *,
    always: float,
    others: float,
    layers: int,
    host: float,
    bandwidth: float | None = None,
    layer_seconds: float | None = None,
    resident: int = 2,
) -> PaperChoice:
    """max alpha with (always + alpha others) / bandwidth <= layer_seconds, and
    (layers - resident) (always + alpha others) <= host.

    Args:
        always: bytes of a layer's input and attention output on one GPU.
        others: bytes of its other saved activations.
        layers: of the model (MEMO has no pipeline).
        host: bytes of host memory of one GPU.
        bandwidth: bytes a second to host memory; None does not limit.
        layer_seconds: forward of a layer.
        resident: last layers, which are not swapped.

    Returns:
        Ratio 0, bound by "D2H", also where the copies that have to be made cannot be hidden.

    Raises:
        NoRoom: not even `always` fits into host memory.
    """
    swapped = layers - resident
    binds, ratio = "none", 1.0
    if bandwidth is not None and layer_seconds is not None:
        hidden = max((bandwidth * layer_seconds - always) / others, 0.0)
        if hidden < ratio:
            binds, ratio = "D2H", hidden
    if swapped > 0:
        fits = (host / swapped - always) / others
        if fits < 0:
            raise NoRoom(
                f"host memory {size_words(host)}: {swapped} layers' inputs and attention outputs "
                f"alone take {size_words(swapped * always)}. Give more host memory, or split the "
                "sequence over more GPUs."
            )
        if fits < ratio:
            binds, ratio = "host memory", fits
    return PaperChoice(ratio, binds)
