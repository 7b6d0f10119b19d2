"""Parts on disk: what makes a run restartable, and its output the same however often it restarts.

NOTE: protocol of the folder ``PREFIX.parts``
    ``lock``         held (flock) by the one run that works here; the system drops it when the run
                     dies, so a killed run leaves nothing to clean up.
    ``plan.json``    the fingerprint of input and settings. Parts of another plan are never used.
    ``N.tokens``     the ids of part N, in the dataset's own type, pieces one after the other.
    ``N.json``       their lengths and what was skipped. Written after ``N.tokens``, and both by
                     rename: a part is done exactly when this file exists.
    Parts depend on the plan alone, and are joined in their order once all are there. So neither
    the number of workers nor a kill at any moment shows in the result. The dataset itself is
    published by renames as well (``publish``), the folder removed last.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_memo.data.parts import Skip

# Examples kept of each kind of skipped piece in one part; all are counted.
_EXAMPLES = 3


@dataclass
class PartReport:
    """What became of one part: the tokens of each piece in order, and what was skipped."""

    lengths: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[Skip] = field(default_factory=list)

    def skip(self, skip: Skip) -> None:
        """Count a skipped piece, and keep the first few of its kind by name."""
        count = self.skipped.get(skip.why, 0)
        self.skipped[skip.why] = count + 1
        if count < _EXAMPLES:
            self.examples.append(skip)


class WorkDir:
    """The folder ``PREFIX.parts``; see the protocol at the top of this file.

    Used as a context manager, it holds the lock.

    Raises:
        ValueError: on entering, if another run holds the lock or the folder belongs to a run with
            another plan and ``discard`` is False.
    """

    def __init__(self, prefix: str, plan: str, *, discard: bool = False) -> None:
        self.prefix = prefix
        self.path = Path(prefix + ".parts")
        self._plan = plan
        self._discard = discard
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> WorkDir:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = open(self.path / "lock", "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"--output-prefix {self.prefix}: another run is preparing it right now. Wait for "
                "that run, or choose another prefix."
            ) from None
        self._lock = lock
        try:
            self._adopt()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _adopt(self) -> None:
        """Take over the parts of an earlier run with the same plan, or start with none."""
        plan_file = self.path / "plan.json"
        if plan_file.exists():
            if _read_plan(plan_file) == self._plan:
                return
            if not self._discard:
                raise ValueError(
                    f"--output-prefix {self.prefix}: {self.path} holds the parts of an unfinished "
                    "run with other input or other settings. Repeat that run's command to finish "
                    "it, or add --overwrite to discard its parts."
                )
        for entry in self.path.iterdir():
            if entry.name != "lock":
                entry.unlink()
        _write(plan_file, json.dumps({"plan": self._plan}).encode())

    def is_done(self, part: int) -> bool:
        """Whether the part was finished, by this run or an earlier one."""
        return self._report_file(part).exists()

    def done(self) -> set[int]:
        """The numbers of all finished parts."""
        return {int(entry.stem) for entry in self.path.glob("[0-9]*.json")}

    def publish(self, files: Iterable[tuple[Path, str]]) -> None:
        """Rename finished files to ``prefix + suffix`` in the order given, then drop the folder.

        The last file is the one that says the dataset is whole, and a set from before loses that
        one first: at no moment does an old file describe a new one.
        """
        pairs = list(files)
        for _, suffix in reversed(pairs):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        for file, suffix in pairs:
            _sync(file)
            file.rename(self.prefix + suffix)
        shutil.rmtree(self.path)

    def _report_file(self, part: int) -> Path:
        return self.path / f"{part:06d}.json"

    def _tokens_file(self, part: int) -> Path:
        return self.path / f"{part:06d}.tokens"

    def write_part(
        self, part: int, pieces: Iterable[npt.NDArray[Any]], report: PartReport, dtype: str
    ) -> None:
        """Store the ids of a part; ``pieces`` may fill ``report`` while it is read.

        Raises:
            ValueError: an id does not fit ``dtype``, so the tokenizer's vocabulary is larger than
                it says.
        """
        tokens_file = self._tokens_file(part)
        new = tokens_file.with_suffix(".tokens.new")
        limit = np.iinfo(dtype).max
        with open(new, "wb") as file:
            for ids in pieces:
                if ids.size == 0:
                    continue
                if int(ids.max()) > limit:
                    raise ValueError(
                        f"The tokenizer gave the id {int(ids.max())}, beyond the vocabulary it "
                        f"reports: ids are stored as {dtype}, up to {limit}. Give the right "
                        "--vocab-size or tokenizer files."
                    )
                file.write(ids.astype(dtype).tobytes())
                report.lengths.append(int(ids.size))
        new.rename(tokens_file)
        _write(self._report_file(part), json.dumps(asdict(report)).encode())

    def read_report(self, part: int) -> PartReport:
        """The report of a finished part."""
        raw = json.loads(self._report_file(part).read_text())
        return PartReport(
            lengths=raw["lengths"],
            skipped=raw["skipped"],
            examples=[Skip(**example) for example in raw["examples"]],
        )

    def read_tokens(self, part: int, dtype: str) -> npt.NDArray[Any]:
        """The ids of a finished part, mapped from its file (``[tokens]``)."""
        file = self._tokens_file(part)
        if file.stat().st_size == 0:
            return np.empty(0, dtype=dtype)
        return np.memmap(file, dtype=dtype, mode="r")


def remove_leftover(prefix: str, plan: str) -> None:
    """Remove the parts of a run that was killed after its last rename, before their removal."""
    path = Path(prefix + ".parts")
    if (path / "plan.json").exists() and _read_plan(path / "plan.json") == plan:
        with WorkDir(prefix, plan):
            shutil.rmtree(path)


def _read_plan(path: Path) -> str:
    return json.loads(path.read_text())["plan"]


def _write(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent at every moment."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_bytes(data)
    new.rename(path)


def _sync(path: Path) -> None:
    """Make sure the bytes are on the disk before a name says that they are."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
