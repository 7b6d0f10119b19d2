"""One iteration, simulated: all pipeline stages together, each rank's streams by their own clock.

A stage stands for its ranks, which do the same at the same time. What is simulated is the order of
work that `schedule` tells, the waits of the swap engine (`mover`), tensor-parallel communication
beside or between compute, context-parallel exchanges around attention, sends between stages, and
the data-parallel gathers and sums.

Not simulated: that streams slow each other down where they share a link or the GPU's memory (copies
both ways at once have the link's full rate each way), the sum of tied embeddings' gradients between
the first and the last stage, the host's own work, and evaluation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from megatron_memo.estimate import flops, schedule
from megatron_memo.estimate.clock import CP, DP, PP, TP, Clock
from megatron_memo.estimate.cost import Costs, Step
from megatron_memo.estimate.mover import Mover
from megatron_memo.estimate.result import Result, StageResult
from megatron_memo.estimate.schedule import Pass
from megatron_memo.estimate.strategies import LayerPlan, Strategy
from megatron_memo.phases import BACKWARD, EMBEDDING, FORWARD, HEAD, LAYER, OPTIMIZER, UPDATE, Phase

# What a stage waits for from another: direction, micro-batch, place (stage and model chunk in the
# order of the layers).
_Message = tuple[str, int, int]
_BARRIER: _Message = ("barrier", 0, 0)


def simulate(
    costs: Costs, strategy: Strategy, sequences: Sequence[Sequence[Pass]] | None = None
) -> Result:
    """One iteration.

    Args:
        costs: of a job on a machine.
        strategy: what is done about activations.
        sequences: what each stage does, of traces (`schedule.passes_of_trace`); None for what the
            job says.

    Raises:
        ValueError: the sequences are of another number of stages or of token chunks.
    """
    job = costs.job
    strategy = strategy.of(job)
    chunks = strategy.chunked(job)
    if sequences is None:
        sequences = [schedule.passes(job, stage, chunks) for stage in range(job.pp)]
    elif len(sequences) != job.pp:
        raise ValueError(f"{len(sequences)} sequences of phases for {job.pp} pipeline stages")
    for sequence in sequences:
        if schedule.chunks_of(sequence) != chunks:
            raise ValueError(
                f"the phases are of {schedule.chunks_of(sequence)} token chunks a layer, the "
                f"strategy {strategy.name!r} has {chunks}"
            )
    stages = [_Stage(costs, strategy, n, list(s), chunks) for n, s in enumerate(sequences)]
    _run(stages)
    seconds = max(stage.clock.end for stage in stages)
    rate = costs.machine.gpu.dense_rate
    return Result(
        strategy=strategy.name,
        seconds=seconds,
        tokens_per_second=job.iteration_tokens / seconds,
        mfu_full=flops.mfu(job, seconds, rate, causal=False),
        mfu_causal=flops.mfu(job, seconds, rate, causal=True),
        stages=tuple(stage.result(seconds) for stage in stages),
    )


def _run(stages: list[_Stage]) -> None:
    """Lets every stage go on until it needs what another has not sent yet."""
    arrived: dict[_Message, float] = {}
    running = {stage.number: stage.work(arrived) for stage in stages}
    needs = {number: next(work) for number, work in running.items()}
    while running:
        if all(need == _BARRIER for need in needs.values()) and len(needs) == len(stages):
            arrived[_BARRIER] = max(stage.clock.now for stage in stages)
        ready = [number for number, need in needs.items() if need in arrived]
        assert ready, f"the schedule waits for itself: {needs}"
        for number in ready:
            try:
                needs[number] = next(running[number])
            except StopIteration:
                del running[number], needs[number]


class _Stage:
    """One rank of a pipeline stage at work."""

    def __init__(
        self,
        costs: Costs,
        strategy: Strategy,
        number: int,
        sequence: list[Pass],
        chunks: int | None,
    ):
        self.costs, self.job, self.strategy = costs, costs.job, strategy
        self.number, self.sequence, self._chunks = number, sequence, chunks
        self.clock = Clock(number)
        self.mover = Mover(self.clock, costs, strategy, limited=True)
        self._plans: dict[int, LayerPlan] = {}
        self._layer: tuple[int, int, int] | None = None  # at work
        self._step = 0  # of that layer
        self._first = True  # no layer of the pass has begun
        self._places = self.job.pp * self.job.virtual
        self._own_table = not self.job.tied or self.job.pp > 1  # the head's
        self._gathered: dict[int, float] = {}  # when a layer's weights are there
        self._last = {
            virtual: max(p.micro_batch for p in sequence if p.virtual == virtual)
            for virtual in {p.virtual for p in sequence if p.direction}
        }

    # ---- passes

    def work(self, arrived: dict[_Message, float]) -> Generator[_Message]:
        """Goes through the iteration; yields what it needs before it can go on."""
        if self.job.overlap_param_gather:
            self._gather_ahead()
        for one in self.sequence:
            if not one.direction:
                yield _BARRIER
                self.clock.wait(PP, arrived[_BARRIER])
                for phase in one.phases:
                    self._after_backward(phase)
                continue
            forward = one.direction == FORWARD
            place = one.virtual * self.job.pp + self.number
            if place != (0 if forward else self._places - 1):
                message = (one.direction, one.micro_batch, place)
                yield message
                self.clock.wait(PP, arrived[message])
            self._first = True
            for phase in one.phases:
                self._perform(phase, one)
            self._end_layer()
            following = place + (1 if forward else -1)
            if 0 <= following < self._places:
                arrived[one.direction, one.micro_batch, following] = self._send(one)

    def _send(self, one: Pass) -> float:
        name = "activations" if one.direction == FORWARD else "gradients"
        seconds = self.costs.send_stage()
        done = self.clock.run(PP, seconds, f"send {name}", one.phases[-1], self.clock.now)
        if not self.job.overlap_p2p:
            self.clock.wait(PP, done)
        return done

    def _perform(self, phase: Phase, one: Pass) -> None:
        if phase.part != LAYER:
            self._end_layer()
            self._ends(phase)
            return
        assert phase.layer is not None
        key = (one.virtual, one.micro_batch, phase.layer)
        begins = key != self._layer
        if begins:
            self._end_layer()
            self._layer = key
            self._begin_layer(key, phase)
        plan = self._plan(phase.layer)
        if self._chunks is None:
            for _ in range(plan.steps):
                self._do_step(key, phase)
        elif phase.chunk is not None or not begins or self._begins_with_experts(plan, phase):
            self._do_step(key, phase)

    def _begins_with_experts(self, plan: LayerPlan, phase: Phase) -> bool:
        """What begins is a step, and not only the layer."""
        return plan.experts and phase.direction == BACKWARD

    # ---- layers

    def _plan(self, layer: int) -> LayerPlan:
        if layer not in self._plans:
            self._plans[layer] = self.strategy.plan(self.costs, layer)
        return self._plans[layer]

    def _begin_layer(self, key: tuple[int, int, int], phase: Phase) -> None:
        plan = self._plan(key[2])
        if phase.direction == FORWARD:
            self._step = 0
            self.clock.wait(DP, self._gathered.get(key[2], 0.0))
            self.mover.begin_layer(key, plan, phase, first=self._first)
            self._first = False
            return
        self._step = plan.steps - 1
        self.mover.begin_backward(key, phase)
        if plan.again_at_start:
            self.mover.read_all(key, phase)
            for again in plan.again_at_start:
                step = self.costs.step(again.kind, key[2], again.share)
                self._work(step, f"{_part(again.kind)} again", phase)

    def _do_step(self, key: tuple[int, int, int], phase: Phase) -> None:
        plan, at = self._plan(key[2]), self._step
        kind, share = plan.kind(at), plan.share(at)
        if phase.direction == FORWARD:
            self._work(self.costs.step(kind, key[2], share), kind, phase)
            self.mover.end_step(key, at, phase)
            self._step += 1
            return
        self.mover.begin_backward_step(key, at, phase)
        for again in plan.again.get(at, ()):
            step = self.costs.step(again.kind, key[2], again.share)
            self._work(step, f"{_part(again.kind)} again", phase)
        self._work(self.costs.step(f"backward {kind}", key[2], share), f"{kind} backward", phase)
        self._step -= 1

    def _end_layer(self) -> None:
        if self._layer is None:
            return
        key, self._layer = self._layer, None
        assert self._step in (-1, self._plan(key[2]).steps), f"layer {key[2]} has steps left"
        if self._step >= 0:
            return
        self.mover.end_backward(key)
        if key[1] == self._last[key[0]]:
            self._reduce(self.job.layer_parameters(key[2]), f"layer {key[2]}")

    def _work(self, step: Step, name: str, phase: Phase) -> None:
        clock = self.clock
        for stream, seconds in ((TP, step.serial), (CP, step.exchange)):
            if seconds:
                clock.wait(stream, clock.run(stream, seconds, name, phase, clock.now))
        began = clock.now
        done = [
            (stream, clock.run(stream, seconds, name, phase, began))
            for stream, seconds in ((TP, step.beside), (CP, step.ring))
            if seconds
        ]
        clock.compute(step.compute, name, phase)
        for stream, end in done:
            clock.wait(stream, end)

    # ---- the rest of an iteration

    def _ends(self, phase: Phase) -> None:
        backward = phase.direction == BACKWARD
        if phase.part == EMBEDDING:
            self.clock.wait(DP, self._gathered.get(0, 0.0))
            self._work(self.costs.embedding(backward), "embedding", phase)
        elif phase.part == HEAD:
            self._work(self.costs.head(backward, self.strategy.loss_chunks), "head", phase)
        last = phase.micro_batch == self._last[phase.stage or 0]
        table = self.job.vocabulary * self.job.hidden // self.job.tp
        if backward and last and (phase.part == EMBEDDING or self._own_table):
            self._reduce(table, phase.part)

    def _reduce(self, parameters: int, name: str) -> None:
        seconds = self.costs.reduce_gradients(parameters)
        self.clock.run(DP, seconds, f"gradients of {name}", Phase(OPTIMIZER), self.clock.now)
        if not self.job.overlap_grad_reduce:
            self.clock.wait(DP, self.clock.free[DP])

    def _gather_ahead(self) -> None:
        layers = [k for v in range(self.job.virtual) for k in self.job.layers_of(self.number, v)]
        table = self.job.vocabulary * self.job.hidden // self.job.tp
        weights = [(0, table)] if self.number == 0 else []
        weights += [(layer, self.job.layer_parameters(layer)) for layer in layers]
        for layer, parameters in weights:
            seconds = self.costs.gather_parameters(parameters)
            self._gathered[layer] = self.clock.run(DP, seconds, "weights", Phase(UPDATE))

    def _after_backward(self, phase: Phase) -> None:
        self.clock.wait(DP, self.clock.free[DP])
        norm, update = self.costs.optimizer(self.number)
        if phase.part == OPTIMIZER:
            self.clock.compute(norm, "gradients' norm", phase)
            return
        self.clock.compute(update, "Adam", phase)
        if not self.job.overlap_param_gather:
            seconds = self.costs.gather_parameters(self.job.parameters(self.number))
            self.clock.wait(DP, self.clock.run(DP, seconds, "weights", phase, self.clock.now))

    def result(self, seconds: float) -> StageResult:
        """What the stage did, in an iteration of so many seconds."""
        clock, mover = self.clock, self.mover
        return StageResult(
            self.number,
            seconds,
            dict(clock.busy),
            dict(clock.exposed),
            mover.host_peak,
            mover.disk_peak,
            mover.moved_out,
            mover.moved_in,
            tuple(clock.events),
        )


def _part(kind: str) -> str:
    return kind.rpartition(" ")[2]
