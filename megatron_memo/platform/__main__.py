"""``python -m megatron_memo.platform SCRIPT [ARGS...]``: run an unmodified Megatron script.

Works under torchrun too: ``torchrun --nproc-per-node 2 -m megatron_memo.platform pretrain_gpt.py``.
Where CUDA works the script simply runs.
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: python -m megatron_memo.platform SCRIPT [ARGS...]"


def main() -> None:
    """Activate the CPU platform if there is no CUDA, then run SCRIPT as ``__main__``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{USAGE}\n\nRuns a Megatron script on a machine without CUDA.")
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.isfile(script):
        print(f"{USAGE}\n\n{script}: no such file; name the script to run.", file=sys.stderr)
        raise SystemExit(2)

    import torch

    from megatron_memo.platform import activate

    if not torch.cuda.is_available():
        activate()
    sys.argv = sys.argv[1:]
    # A script finds the modules beside it, as it would when started directly.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
