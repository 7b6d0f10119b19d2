"""Runs pieces of the shell scripts' library in a bash of their own."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "scripts" / "lib"
BASH = shutil.which("bash") or "/bin/bash"


def bash(program, *arguments, env=None, timeout=60):
    """Runs ``program`` with the library sourced and ``arguments`` as $1, $2, ...

    The library's own options hold (``set -euo pipefail``, as in every script that sources it).
    """
    sources = "".join(f'source "{LIB}/{name}.sh"\n' for name in ("progress", "python", "env"))
    return subprocess.run(
        [BASH, "-c", f"set -euo pipefail\n{sources}{program}", "test", *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
