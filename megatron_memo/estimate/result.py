"""What a simulated iteration came to."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_memo.estimate.clock import COMPUTE, Event


@dataclass(frozen=True)
class StageResult:
    """What one rank of a pipeline stage did.

    Attributes:
        seconds: until its last stream was through.
        busy: seconds by stream.
        exposed: seconds that compute stood still, by the stream that it waited for ("pp" has the
            pipeline's bubble in it).
        host_peak, disk_peak: bytes of this rank.
        moved_out, moved_in: bytes that went to the host and came back.
        events: in the order in which they were given to their streams.
    """

    stage: int
    seconds: float
    busy: dict[str, float]
    exposed: dict[str, float]
    host_peak: int
    disk_peak: int
    moved_out: int
    moved_in: int
    events: tuple[Event, ...]

    @property
    def idle(self) -> float:
        """Seconds after compute was through, until the iteration was."""
        return self.seconds - self.busy[COMPUTE] - sum(self.exposed.values())


@dataclass(frozen=True)
class Result:
    """A simulated iteration.

    Attributes:
        strategy: its name.
        seconds: of the step.
        tokens_per_second: of the whole run.
        mfu_full, mfu_causal: `flops.MFU_FORMULA`, attention counted in full or as half.
        stages: by pipeline stage.
    """

    strategy: str
    seconds: float
    tokens_per_second: float
    mfu_full: float
    mfu_causal: float
    stages: tuple[StageResult, ...]

    @property
    def exposed(self) -> dict[str, float]:
        """The longest that any stage stood still, by stream."""
        names = self.stages[0].exposed
        return {name: max(s.exposed[name] for s in self.stages) for name in names}

    @property
    def busy(self) -> dict[str, float]:
        """The largest share of the step that each stream ran on any stage."""
        names = self.stages[0].busy
        return {name: max(s.busy[name] for s in self.stages) / self.seconds for name in names}

    @property
    def host_peak(self) -> int:
        """Bytes of the rank that needs most host memory."""
        return max(s.host_peak for s in self.stages)

    @property
    def disk_peak(self) -> int:
        """Bytes of the rank that needs most disk space."""
        return max(s.disk_peak for s in self.stages)
