"""One profile: Megatron's own ``pretrain`` on tensors without data, one rank of many, watched.

Everything is the training run's but the tensors: arguments, refusals, model, DDP, optimizer,
schedule, step. The window is one iteration, from the begin of a step to the begin of the next.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_memo import compat, compat_versions, platform
from megatron_memo.arguments import ratio_is_auto
from megatron_memo.config import MemoConfig
from megatron_memo.ops import as_on_cuda, fused, workspace
from megatron_memo.ops.target import show_kernels_of
from megatron_memo.phases import Phase
from megatron_memo.profile.fingerprint import fingerprint
from megatron_memo.profile.held import HeldParts
from megatron_memo.profile.ranks import Place
from megatron_memo.profile.recorder import Recorder
from megatron_memo.profile.trace import Event, Header, Malloc, Trace
from megatron_memo.profile.words import EVEN_EXPERTS, profiled_words
from megatron_memo.swap.engine import get_engine

RECORDED = 2  # the first iteration holds allocations that are made once
GPU_MEMORY = 80 << 30  # bytes that the GPU says it has, for settings that follow it
ROUNDING = {"cuda": 512, "cpu": 64}
# Tensors that are memory of the device that is played.
DEVICE_TYPES = {"cuda": ("meta",), "cpu": ("meta", "cpu")}


@dataclass(frozen=True)
class Finding:
    """What a session saw.

    Attributes:
        trace: of iteration `RECORDED`.
        again: of the iteration after it, if it was asked for.
        host_bytes: host memory of the swap engine at the end.
        resident: numbers of the layers that keep their activations.
        place: the rank among the others.
    """

    trace: Trace
    again: Trace | None
    host_bytes: int
    resident: tuple[int, ...]
    place: Place


class Windowed(Protocol):
    """What a session needs of a recorder; see `Recorder`."""

    def start(self) -> None:
        """The window begins."""

    def stop(self) -> tuple[list[Phase], list[Event], list[Malloc]]:
        """It has ended: phases, events, what was alive when it began."""


class _Finished(BaseException):
    """Leaves Megatron's training loop; no handler of its takes it for a failure."""


class Session:
    """What is learned on the way through Megatron, and when it is recorded.

    Args:
        recorder: told when the window begins and ends.
        device: whose kernels are shown.
        windows: how many iterations are recorded.
        tell: called with a few words as the session gets on.
    """

    def __init__(
        self, recorder: Windowed, device: str, windows: int, tell: Callable[[str], None]
    ) -> None:
        self._recorder = recorder
        self._device = device
        self._wanted = windows
        self._tell = tell
        self.args: Any = None
        self.memo: MemoConfig | None = None
        self.place: Place | None = None
        self.resident: tuple[int, ...] = ()
        self.windows: list[Trace] = []
        self.notes: list[str] = []
        self._chunks: list[torch.nn.Module] = []
        self._parts = HeldParts(DEVICE_TYPES[device])
        self._held_parts: dict[str, int] = {}

    def see_model(self, chunks: list[torch.nn.Module]) -> None:
        """Called before the first step."""
        from megatron_memo.profile.markers import mark_model
        from megatron_memo.profile.ranks import place

        mark_model(chunks)
        self._chunks = chunks
        self.place = place(chunks)
        self.resident = tuple(
            int(module.position)  # type: ignore[arg-type]
            for chunk in chunks
            for module in chunk.modules()
            if getattr(module, "resident", False)
        )
        self._tell("model and optimizer are set up")

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Called around every training step; the window is from one call to the next."""
        if iteration > RECORDED:
            self._end_window(iteration - 1)
        if len(self.windows) == self._wanted:
            raise _Finished
        if iteration >= RECORDED:
            self._held_parts = self._parts.bytes_of(self._chunks)
            self._recorder.start()
        self._tell(f"iteration {iteration}")
        return run()

    def _end_window(self, iteration: int) -> None:
        phases, events, held = self._recorder.stop()
        assert self.place is not None
        if self._device == "cuda":
            held.append(kept_workspace(events, held))
        host = get_engine().host.total_bytes
        swapped = (f"{host} bytes of host memory hold what is swapped",) if host else ()
        header = Header(
            source="profile",
            device=self._device,
            rounding=ROUNDING[self._device],
            rank=self.args.rank,
            world_size=self.args.world_size,
            iteration=iteration,
            fingerprint=fingerprint(self.args, self.memo, self.place.fingerprint),
            same_ranks=self.place.own,
            notes=(*self.notes, *swapped),
            held_parts=self._held_parts,
            host_bytes=host,
        )
        self.windows.append(Trace(header, tuple(phases), tuple(events), tuple(held)))


def profile(
    words: Sequence[str],
    *,
    device: str,
    check: bool = False,
    tell: Callable[[str], None] = lambda _words: None,
) -> Finding:
    """Runs two iterations (three to check) of `words` and records the second.

    A process can do this once: see ``platform.activate_meta``. Megatron finds the rank to play in
    RANK and WORLD_SIZE, which the caller has set.

    Args:
        words: Megatron's and memo's flags.
        device: "cuda" or "cpu", whose kernels and allocator are asked about.
        check: record the third iteration too.
        tell: called with a few words as the session gets on.

    Raises:
        ValueError: a mistake in the words, as training would answer it.
    """
    on_cuda = device == "cuda"
    show_kernels_of(device)
    platform.activate_meta(
        plays_cuda=on_cuda,
        instead=as_on_cuda.FUNCTIONS if on_cuda else None,
        compile_with=fused.compile_as_region if on_cuda else None,
        memory=GPU_MEMORY if on_cuda else None,
    )
    recorder = (
        Recorder(*DEVICE_TYPES[device], workspaces=workspace.of_cuda_kernel)
        if on_cuda
        else Recorder(*DEVICE_TYPES[device])
    )
    session = Session(recorder, device, 2 if check else 1, tell)
    sys.argv = [sys.argv[0], *profiled_words(words)]
    with recorder.hearing(), recorder:
        pretrain(session, on_cuda)
    assert session.windows and session.place is not None
    return Finding(
        session.windows[0],
        session.windows[1] if check else None,
        get_engine().host.total_bytes,
        session.resident,
        session.place,
    )


def pretrain(session: Session, on_cuda: bool) -> None:
    """The launcher's way through Megatron, with the session around every training step.

    Args:
        session: ends it when it has seen enough.
        on_cuda: CUDA's kernels are shown, by tensors without data.
    """
    compat_versions.check_version(training=True)

    from megatron.training.arguments import parse_args

    from megatron_memo.training import command_line
    from megatron_memo.training.auto_setup import ratio_without_run
    from megatron_memo.training.cpu_defaults import follow_cpu

    compat.install_import_hooks()
    raw = parse_args(extra_args_provider=command_line.add_arguments)
    if on_cuda:
        _follow_meta(raw, session.notes)
    else:
        command_line.imply(follow_cpu(raw), "no CUDA here")
    _check_pack(raw)
    command_line.check_before_start(raw)
    _check_experts(raw)
    try:
        args = compat_versions.parse_and_validate_args(
            command_line.add_arguments, dict(command_line.ARGS_DEFAULTS)
        )
    except AssertionError as refused:
        raise ValueError(f"Megatron refuses these flags: {refused or 'an assertion'}") from refused
    # The fake group turns this off because it finds NaN in what it never sent. Nothing is found
    # in tensors without data, and training has it.
    args.check_for_nan_in_loss_and_grad = raw.check_for_nan_in_loss_and_grad
    memo, modules, _ = command_line.check_validated(args)
    if memo is not None and ratio_is_auto(args):
        memo = dataclasses.replace(memo, swap_ratio=ratio_without_run(args))
    session.args, session.memo = args, memo

    from megatron_memo.profile.batches import provider
    from megatron_memo.profile.markers import mark_steps
    from megatron_memo.training.gpt import embedding_ranks, forward_step

    model_config = command_line.model_config(args, memo, modules)
    mark_steps()
    compat.wrap_train_step(session.step, lambda _iteration, run: run(), first=session.see_model)
    with suppress(_Finished):
        compat_versions.pretrain(
            args,
            model_config,
            provider(on_host=on_cuda),
            forward_step,
            get_embedding_ranks=embedding_ranks,
        )


def _check_pack(args: Namespace) -> None:
    """Refuses packed sequences.

    Raises:
        ValueError: their lengths are data, and decide what attention asks for.
    """
    for name in ("sft", "dataloader_inter_document_masking"):
        if getattr(args, name, False):
            raise ValueError(
                f"--{name.replace('_', '-')}: packs sequences whose lengths differ from batch to "
                "batch, and a profile has no data. Drop the flag to profile whole sequences."
            )


def _check_experts(args: Namespace) -> None:
    """A profile has no data, and what experts ask for depends on where a router sends it; unless
    every expert is given as many tokens as any other.

    Raises:
        ValueError: the model has experts that get what the router says.
    """
    if getattr(args, "num_experts", None) and not args.moe_pad_expert_input_to_capacity:
        raise ValueError(
            f"--num-experts {args.num_experts}: how many tokens an expert gets depends on the "
            "data, and a profile has none. Profile experts that all get as many: add "
            f"{' '.join(EVEN_EXPERTS)}; or train with --memo-measure-memory ITER, which tells what "
            "they take."
        )


def _follow_meta(args: Namespace, notes: list[str]) -> None:
    """What CUDA has kernels for and a profile cannot show: plain code stands in, or it is refused.

    Raises:
        ValueError: Transformer Engine's modules, which allocate where no profile can look.
    """
    if args.transformer_impl != "local":
        raise ValueError(
            f"--transformer-impl {args.transformer_impl}: its kernels are compiled for a GPU and "
            "allocate where a profile without one cannot look. Give --transformer-impl local."
        )
    for name, flag in (
        ("masked_softmax_fusion", "--no-masked-softmax-fusion"),
        ("apply_rope_fusion", "--no-rope-fusion"),
    ):
        if getattr(args, name):
            sys.argv.append(flag)
            notes.append(f"profiled with {flag}, which a run needs too if a plan is to fit it")


def kept_workspace(events: Sequence[Event], held: Sequence[Malloc]) -> Malloc:
    """cuBLAS's workspace, which torch asks for once and keeps: alive when the window begins."""
    numbers = [block.id for block in held] + [e.id for e in events if isinstance(e, Malloc)]
    return Malloc(max(numbers) + 1, workspace.cublas(compute_capability=9), 0, "workspace:cublas")
