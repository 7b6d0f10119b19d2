"""An environment with another megatron-core, made in seconds from the one that runs this.

    python scripts/lib/version_env.py VERSION FOLDER

Everything but Megatron and memo is linked from this Python's own packages; of megatron-core only
its wheel is installed (2 MB). FOLDER is kept and used again until one of the two changes. Prints
the path of the environment's Python. Memo itself is not in it: put the repo on PYTHONPATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# What must not be there twice. (pip's own files of an editable install begin with __editable__.)
_NOT_LINKED = ("megatron", "megatron_core-", "megatron_memo", "__editable__", "__pycache__")
_STAMP = ".memo-version"


class NoRegistry(RuntimeError):
    """No package registry can be reached from here."""


def make(version: str, folder: Path) -> Path:
    """The Python of an environment at ``folder`` that has megatron-core ``version``.

    Args:
        version: as pip knows it, such as "0.17.1".
        folder: made, or made anew where it is of another version or of another Python.

    Raises:
        ValueError: the folder is somebody else's.
        RuntimeError: pip cannot install the version; its last words are in the message.
        NoRegistry: of these, that pip sees no version of it at all.
    """
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_paths()["purelib"])
    stamp = f"{version} {own}\n"
    if (folder / _STAMP).exists() and (folder / _STAMP).read_text() == stamp:
        return python
    if folder.exists():
        if not (folder / "pyvenv.cfg").exists():
            raise ValueError(
                f"{folder}: is no environment that this program made. Name another folder."
            )
        shutil.rmtree(folder)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    packages = folder / own.relative_to(sys.prefix)
    for entry in own.iterdir():
        if not entry.name.startswith(_NOT_LINKED):
            (packages / entry.name).symlink_to(entry)
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    options += ["--only-binary", ":all:", "--target", str(packages)]
    _run([sys.executable, "-m", "pip", "install", *options, f"megatron-core=={version}"])
    (folder / _STAMP).write_text(stamp)  # last: a folder with it is whole
    return python


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        kind = NoRegistry if "(from versions: none)" in done.stderr else RuntimeError
        raise kind(f"{words[-1]}: {said[-1] if said else f'status {done.returncode}'}")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(str(__doc__))
    try:
        print(make(sys.argv[1], Path(sys.argv[2]).absolute()))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"version_env.py: error: {error}")


if __name__ == "__main__":
    main()
