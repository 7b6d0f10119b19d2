"""Figures that benchmarks/figures.py draws, in a light and a dark variant."""

from __future__ import annotations

from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "figures"
THEMES = ("light", "dark")


def figure(kind: str, alt: str, caption: str) -> str:
    """Markdown of a figure and its caption; empty where it has not been drawn.

    Args:
        kind: the beginning of the files' names.
        alt: what is to be seen, for those who do not see it.
        caption: Markdown.
    """
    files = [next(iter(FIGURES.glob(f"{kind}-{theme}.*")), None) for theme in THEMES]
    if None in files:
        return ""
    images = [
        # With a width, Sphinx links to the whole image.
        f"```{{image}} figures/{path.name}\n:class: only-{theme}\n:alt: {alt}\n:width: 100%\n```"
        for path, theme in zip(files, THEMES, strict=True)
        if path is not None
    ]
    return "\n".join([*images, f":::{{container}} memo-caption\n{caption}\n:::"])
