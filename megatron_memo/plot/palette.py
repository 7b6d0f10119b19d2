"""Colours that stay apart for every kind of colour vision, on white and on near-black.

Named ones are those of Okabe and Ito (2008), lightened on dark grounds where they would be too
faint. Layers and ratios take a ramp of rising lightness (viridis, cut at the end that the ground
would swallow), so that their order is seen without colour too.
"""

from __future__ import annotations

from typing import NamedTuple

THEMES = ("light", "dark")


class Colour(NamedTuple):
    """A colour with its meaning, as #rrggbb for each ground.

    Attributes:
        label: what it stands for.
        ramp: one of an ordered family, of which the first and the last are named in a legend.
    """

    label: str
    light: str
    dark: str
    ramp: bool = False

    def on(self, theme: str) -> str:
        """For a ground of `THEMES`."""
        return self.dark if theme == "dark" else self.light

    def named(self, label: str) -> Colour:
        """The same for something else."""
        return self._replace(label=label)


BLUE = Colour("", "#0072b2", "#56b4e9")
SKY = Colour("", "#56b4e9", "#9ad4f5")
ORANGE = Colour("", "#e69f00", "#f0b93a")
GREEN = Colour("", "#009e73", "#2fc99b")
VERMILION = Colour("", "#d55e00", "#f07f2e")
PINK = Colour("", "#cc79a7", "#e29cc3")
YELLOW = Colour("", "#c9b400", "#f0e442")
GREY = Colour("", "#7a7f87", "#9aa1ab")
INK = Colour("", "#1f2328", "#e6e8eb")

_RAMP = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
_CUT = {"light": (0.0, 0.86), "dark": (0.22, 1.0)}


class Ground(NamedTuple):
    """What is behind and around a figure.

    Attributes:
        paper: the ground; `plot` that of the axes.
        ink: text; `faint` of less weight.
        grid: lines of the grid and frames.
    """

    paper: str
    plot: str
    ink: str
    faint: str
    grid: str


GROUNDS = {
    "light": Ground("#ffffff", "#ffffff", "#1f2328", "#59636e", "#d8dde3"),
    "dark": Ground("#14171c", "#191d23", "#e6e8eb", "#9aa4b0", "#363d47"),
}


def ramp(share: float, label: str = "") -> Colour:
    """The ramp's colour at 0 (dark violet) to 1 (yellow), cut for each ground."""
    share = min(max(share, 0.0), 1.0)
    light, dark = (_at(low + share * (high - low)) for low, high in (_CUT[t] for t in THEMES))
    return Colour(label, light, dark, ramp=True)


def family(labels: list[str]) -> list[Colour]:
    """Colours of an ordered family; neighbours differ a little more than along the ramp alone."""
    last = max(len(labels) - 1, 1)
    found = []
    for k, label in enumerate(labels):
        colour = ramp(k / last, label)
        if k % 2:
            light = _mixed(colour.light, GROUNDS["light"].plot, 0.16)
            colour = colour._replace(light=light, dark=_mixed(colour.dark, "#000000", 0.16))
        found.append(colour)
    return found


def _at(share: float) -> str:
    place = share * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[low], _RAMP[low + 1], place - low)


def _mixed(one: str, other: str, share: float) -> str:
    pairs = ((int(one[k : k + 2], 16), int(other[k : k + 2], 16)) for k in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in pairs)
