"""Tokenize in parallel, join, publish."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_memo.data.options import BuildOptions
from megatron_memo.data.pack import join_pieces
from megatron_memo.data.parts import Skip, Unit, cut, read_pieces
from megatron_memo.data.preflight import check_output, check_space
from megatron_memo.data.record import Summary, fingerprint
from megatron_memo.data.sources import Source
from megatron_memo.data.tokenizer import Tokenizer
from megatron_memo.data.upstream import load_indexed_dataset
from megatron_memo.data.workdir import PartReport, WorkDir

# Called with the bytes of input that were read since the last call.
Progress = Callable[[int], None]


def build(
    sources: Sequence[Source], options: BuildOptions, *, progress: Progress | None = None
) -> Summary:
    """Make the dataset at ``options.prefix`` from ``sources``, going on where a killed run ended.

    Raises:
        ValueError: a user's mistake, in one paragraph that names the flag.
        OSError: reading or writing failed; what was finished stays, and the next run goes on.
    """
    plan = fingerprint(sources, options)
    check_output(options.prefix, overwrite=options.overwrite)
    check_space(sources, options)
    tokenizer = options.tokenizer.build()
    dtype = np.dtype(tokenizer.dtype).name
    parts = cut(sources, options.part_bytes)
    with WorkDir(options.prefix, plan, discard=options.overwrite) as work:
        job = _Job(work, list(sources), parts, options, dtype)
        todo = [number for number in range(len(parts)) if not work.is_done(number)]
        if progress is not None:
            progress(_input_bytes(parts, set(range(len(parts))) - set(todo)))
        _run(job, todo, tokenizer, progress)
        return _join(job, tokenizer, plan)


@dataclass(frozen=True)
class _Job:
    work: WorkDir
    sources: list[Source]
    parts: list[list[Unit]]
    options: BuildOptions
    dtype: str

    def run_part(self, number: int, tokenizer: Tokenizer) -> int:
        """Tokenize one part and store it; returns its number."""
        report = PartReport()
        self.work.write_part(number, self._pieces(number, tokenizer, report), report, self.dtype)
        return number

    def _pieces(
        self, number: int, tokenizer: Tokenizer, report: PartReport
    ) -> Iterator[npt.NDArray[Any]]:
        for unit in self.parts[number]:
            source = self.sources[unit.index]
            for piece in read_pieces(source, unit, self.options.read):
                if isinstance(piece, Skip):
                    report.skip(piece)
                else:
                    yield tokenizer.encode(piece)


def _run(job: _Job, todo: list[int], tokenizer: Tokenizer, progress: Progress | None) -> None:
    """Do the parts in ``todo``, in this process or in ``options.workers`` others."""
    report = progress if progress is not None else _no_progress
    workers = min(job.options.workers, len(todo))
    if workers <= 1:
        for number in todo:
            report(_input_bytes(job.parts, {job.run_part(number, tokenizer)}))
        return
    # Spawned, not forked: torch is loaded here by now, and its threads do not survive a fork.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(job.options.prefix, job.sources, job.parts, job.options, job.dtype),
    )
    try:
        with _interrupts_held():
            futures = [pool.submit(_work, number) for number in todo]
        for future in as_completed(futures):
            report(_input_bytes(job.parts, {future.result()}))
    except BrokenProcessPool as error:
        raise ValueError(
            "A worker was ended from outside, most likely for want of memory. What is finished "
            f"stays: run the same command again, with fewer --workers than {workers}."
        ) from error
    except KeyboardInterrupt:
        # They do not hear it themselves, and an unfinished part is not worth waiting for.
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which a terminal sends to all of them.

    They inherit the blocked signal, so it cannot catch them while they still import, before any
    code of ours runs there, and print a traceback each. Here it arrives on leaving: another thread
    may take a signal that is blocked in this one, and an exception in the middle of starting a
    process would leave it half started.
    """
    held: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(1)) if in_main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if in_main:
            signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


_worker: tuple[_Job, Tokenizer] | None = None


def _start_worker(
    prefix: str,
    sources: list[Source],
    parts: list[list[Unit]],
    options: BuildOptions,
    dtype: str,
) -> None:
    """First thing in a worker: build the tokenizer, and end when the run that started it ends."""
    global _worker
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A killed parent closes no queue, so its workers would wait for work for ever.
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    # Parts are written under the lock of the parent.
    job = _Job(WorkDir(prefix, ""), sources, parts, options, dtype)
    _worker = (job, options.tokenizer.build())


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _work(number: int) -> int:
    assert _worker is not None
    job, tokenizer = _worker
    return job.run_part(number, tokenizer)


def _join(job: _Job, tokenizer: Tokenizer, plan: str) -> Summary:
    """Join all parts into the dataset and publish it."""
    options, work = job.options, job.work
    summary = Summary(plan=plan, flags=list(options.tokenizer.flags))
    bin_file, idx_file, json_file = (work.path / f"final.{kind}" for kind in ("bin", "idx", "out"))
    builder = load_indexed_dataset().IndexedDatasetBuilder(str(bin_file), dtype=tokenizer.dtype)
    documents = join_pieces(
        _all_pieces(job, summary), eod=tokenizer.eod, at_least=options.document_tokens or 1
    )
    for document in documents:
        tokens = int(document.size)
        if tokens < options.min_document_tokens:
            summary.dropped += 1
            continue
        builder.add_document(document, [tokens])
        summary.shortest = min(summary.shortest or tokens, tokens)
        summary.longest = max(summary.longest, tokens)
        summary.documents += 1
        summary.tokens += tokens
    builder.finalize(str(idx_file))
    if not summary.documents:
        shutil.rmtree(work.path)
        raise ValueError(_nothing_left(summary, options))
    summary.bin_bytes = bin_file.stat().st_size
    json_file.write_text(json.dumps(asdict(summary), indent=1))
    # The index last: Megatron, and the next run, take the dataset to be there when it is.
    work.publish([(bin_file, ".bin"), (json_file, ".json"), (idx_file, ".idx")])
    return summary


def _all_pieces(job: _Job, summary: Summary) -> Iterator[npt.NDArray[Any]]:
    """The pieces of all parts in order; adds what the parts skipped to the summary."""
    for number in range(len(job.parts)):
        report = job.work.read_report(number)
        for why, count in report.skipped.items():
            summary.skipped[why] = summary.skipped.get(why, 0) + count
        # A few names of each kind are enough, and the first ones do not depend on the workers.
        for example in report.examples:
            if sum(seen.why == example.why for seen in summary.examples) < 3:
                summary.examples.append(example)
        tokens = job.work.read_tokens(number, job.dtype)
        start = 0
        for length in report.lengths:
            yield tokens[start : start + length]
            start += length


def _nothing_left(summary: Summary, options: BuildOptions) -> str:
    why = ", ".join(f"{count} {kind}" for kind, count in summary.skipped.items())
    names = "; ".join(f"{skip.where}: {skip.detail or skip.why}" for skip in summary.examples[:3])
    message = "The input holds no text to train on"
    if why:
        message += f": skipped {why} ({names})"
    if summary.dropped:
        message += (
            f": all {summary.dropped} documents are shorter than --min-document-tokens "
            f"{options.min_document_tokens}"
        )
    return message + ". Nothing was written."


def _input_bytes(parts: list[list[Unit]], numbers: set[int]) -> int:
    return sum(unit.end - unit.start for number in numbers for unit in parts[number])


def _no_progress(_: int) -> None:
    """Nobody watches."""
