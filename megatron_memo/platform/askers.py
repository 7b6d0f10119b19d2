"""Who is asking? Megatron must believe in a device; torch and everybody else get the truth.

Megatron refuses to start unless ``torch.cuda.is_available()`` and reads tensor type names such as
``torch.cuda.FloatTensor``. Answering everybody that way would send torch's own code (data loaders,
optimizers, checkpointing, ``torch.accelerator``) to a driver that is not there, and each such place
would need a patch of its own. So the few answers that are not true depend on the caller.
"""

from __future__ import annotations

import sys


def asked_by_megatron(depth: int = 2) -> bool:
    """True if the code ``depth`` frames up (2: the caller of the caller) belongs to megatron."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name == "megatron" or name.startswith("megatron.")
