"""How Sphinx builds these pages; scripts/docs.sh runs it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from megatron_memo import __version__  # noqa: E402

project = "Megatron-MEMO"
author = "the Megatron-MEMO authors"
release = version = __version__

extensions = ["myst_parser", "memo_pages"]
exclude_patterns = ["_build", "_ext", "recorded"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# "--" is the beginning of a flag here, never a dash.
smartquotes = False
highlight_language = "none"

html_theme = "furo"
html_title = "Megatron-MEMO"
html_static_path = ["_static"]
html_css_files = ["memo.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
