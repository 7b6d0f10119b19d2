"""Which part of a sequence is swapped: the program that decides `--memo-swap-ratio auto`.

`problem` says what is known of a rank, `cost` what a decision costs, `model` finds the cheapest
with CP-SAT, `solve` adds what binds and what relaxing it would buy. `schedule` counts micro-batches
in flight, `paper` is MEMO's own program, which only asks for the largest ratio.
"""

from .paper import PaperChoice, paper_program
from .problem import LAYERS, Depth, Disk, Link, NoRoom, Problem, Times
from .solve import Choice, Limit, Relaxed, solve

__all__ = [
    "LAYERS",
    "Choice",
    "Depth",
    "Disk",
    "Limit",
    "Link",
    "NoRoom",
    "PaperChoice",
    "Problem",
    "Relaxed",
    "Times",
    "paper_program",
    "solve",
]
