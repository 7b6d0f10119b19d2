"""The page that a run leaves beside its checkpoints."""

import itertools
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import megatron.training
import pytest
import torch

from megatron_memo.config import HostSettings, MemoConfig
from megatron_memo.plan.made_up_traces import Shape, training
from megatron_memo.plan.planner import Search, Source, make_plan
from megatron_memo.plot.page import DATA_TYPE, Table, Words, unpacked
from megatron_memo.training import telling
from megatron_memo.training.history import History
from megatron_memo.training.run_page import FIRST, RunPage
from megatron_memo.training.run_page_parts import RunParts, course, run_page

ARGS = Namespace(
    save="/nowhere",
    save_interval=10,
    rank=3,
    world_size=4,
    num_layers=4,
    mtp_num_layers=None,
    hidden_size=32,
    seq_length=256,
    micro_batch_size=1,
    global_batch_size=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    data_parallel_size=2,
    sequence_parallel=True,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Watched:
    """A page whose parts, lines and links are kept."""

    def __init__(self, path, interval=None, parts=None):
        self.clock, self.said, self.links, self.asked = Clock(), [], [], []
        self.page = RunPage(
            path,
            interval=interval,
            parts=parts or self.parts,
            say=self.said.append,
            link=lambda *told: self.links.append(told),
            clock=self.clock,
        )

    def parts(self, entries, scalars):
        self.asked.append((list(entries), dict(scalars)))
        return [Words("So far", [str(len(entries))])]

    def train(self, first, last, loss=None):
        def run():
            self.clock.now += 2.0
            return ({} if loss is None else {"lm loss": torch.tensor(loss)}, 0)

        for iteration in range(first, last + 1):
            assert self.page.step(iteration, run)[1] == 0


def test_it_is_written_early_with_each_checkpoint_and_at_the_end(tmp_path):
    path = tmp_path / "memo_plan" / "report.html"
    watched = Watched(path, interval=10)
    watched.train(1, FIRST - 1)
    assert not path.exists()
    watched.train(FIRST, 25)
    watched.page.write()
    assert [len(entries) for entries, _ in watched.asked] == [FIRST, 10, 20, 25]
    assert "Iterations 1 to 25" in path.read_text("utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_one_line_and_one_link_name_the_file(tmp_path):
    path = tmp_path / "report.html"
    watched = Watched(path, interval=4)
    watched.train(1, 12)
    (line,) = watched.said
    assert str(path) in line
    assert watched.links == [(4, str(path))]


def test_a_page_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path):
    (tmp_path / "memo_plan").write_text("a file where a folder is wanted")
    watched = Watched(tmp_path / "memo_plan" / "report.html", interval=2)
    watched.train(1, 12)
    watched.page.write()
    (line,) = watched.said
    assert "report.html: the run's report is not written from here on (" in line
    assert watched.links == []


def test_a_mistake_in_the_page_does_not_end_training(tmp_path):
    def parts(_entries, _scalars):
        raise ZeroDivisionError("no such thing")

    watched = Watched(tmp_path / "report.html", interval=1, parts=parts)
    watched.train(1, 4)
    (line,) = watched.said
    assert line.endswith("(ZeroDivisionError: no such thing)")


def test_a_failing_step_is_not_hidden(tmp_path):
    def step():
        raise RuntimeError("out of memory")

    watched = Watched(tmp_path / "report.html")
    with pytest.raises(RuntimeError, match="out of memory"):
        watched.page.step(1, step)


class Loss:
    """Counts how often it is read."""

    reads = 0

    def __float__(self):
        Loss.reads += 1
        return 1.5


def test_losses_are_read_when_the_page_is_written_and_once():
    history = History()
    for iteration in range(1, 5):
        history.add(iteration, 1.0, Loss())
    assert Loss.reads == 0
    for _ in range(2):
        assert [entry.loss for entry in history.entries()] == [1.5] * 4
    assert Loss.reads == 4


def test_a_long_history_keeps_its_means_in_bounded_memory():
    history, steps = History(), 30_001
    for iteration in range(1, steps + 1):
        history.add(iteration, float(iteration), None if iteration % 3 else 2.0)
    entries = history.entries()
    assert len(entries) <= 4096
    assert sum(entry.steps for entry in entries) == steps
    assert entries[0].first == 1 and entries[-1].last == steps
    assert all(one.last + 1 == two.first for one, two in itertools.pairwise(entries))
    total = sum(entry.seconds * entry.steps for entry in entries)
    assert total == pytest.approx(steps * (steps + 1) / 2)
    assert {entry.loss for entry in entries} <= {2.0, None}


def test_a_loss_that_the_next_step_overwrites_is_kept(tmp_path):
    watched = Watched(tmp_path / "report.html")
    loss = torch.tensor(1.0)
    watched.page.step(1, lambda: ({"lm loss": loss}, 0))
    loss.fill_(9.0)
    watched.page.write()
    ((entries, _),) = watched.asked
    assert entries[0].loss == 1.0


@pytest.fixture(scope="module")
def plan():
    source = Source("iteration 3", "", training(Shape(3, unit=1 << 20)))
    return make_plan([source], Search(time_limit=20, workers=1, use_cp_sat=False)).plan


def planned(plan):
    steps = [{"iteration": 5, "requests": 12, "native_entries": 2, "hits": 10}]
    return SimpleNamespace(plan_in_use=plan, report=lambda: {"steps": steps})


def parts_of(**changes):
    given = {"memo": MemoConfig(0.5, host=HostSettings(budget=3 << 30, need=1 << 30))}
    given |= {"planned": None, "auto": None, "said": lambda: ["one", "two"], **changes}
    return RunParts(ARGS, given["memo"], given["planned"], given["auto"], given["said"])


def entries():
    history = History()
    for iteration in range(1, 4):
        history.add(iteration, 0.5 * iteration, 4.0 - iteration)
    return history.entries()


def rows(parts, title):
    (table,) = [part for part in parts if isinstance(part, Table) and part.title == title]
    return dict(table.rows)


def test_settings_limits_and_what_was_said_are_on_it():
    found = parts_of()(entries(), {2: {"host bytes": 2.0 * 2**29, "D2H bytes": 7.0}})
    run = rows(found, "The run")
    assert run["ranks"] == "4 (tensor 2, pipeline 1, context 1, data 2)"
    assert run["memo"].startswith("ratio 0.5: 128 of 256 tokens swapped")
    assert run["loss"] == "1 at iteration 3"
    assert run["seconds an iteration"].startswith("1.25 s in the mean, 1.5 s last")
    host = rows(found, "Host memory of one rank")
    assert host == {
        "needed, by the bill": "1 GiB",
        "to be had": "3 GiB",
        "taken, by the rank that has most": "1 GiB",
    }
    assert found[-1] == Words("What memo said in the log", ["one", "two"])


def test_a_ratio_of_auto_is_named_when_it_is_known():
    auto = SimpleNamespace(ratio=None)
    parts = parts_of(memo=MemoConfig(0.0), auto=auto)
    assert rows(parts(entries(), {}), "The run")["swap ratio"] == "auto: not chosen yet"
    auto.ratio = 0.25
    said = rows(parts(entries(), {}), "The run")["memo"]
    assert said.startswith("chosen by auto; ratio 0.25: 64 of 256")


def test_a_plan_in_use_is_drawn_once(plan):
    parts = parts_of(planned=planned(plan))
    first, again = (parts(entries(), {}) for _ in range(2))
    said = rows(first, "Memory plan of this rank")
    assert said["last step"] == "10 of 10 requests served at their addresses"
    (data,) = re.findall(f'{DATA_TYPE}">([^<]*)<', first[-2].html)
    assert len(unpacked(data)["panels"][0]["boxes"]["x0"]) > 50
    assert again[-2] is first[-2]


def test_a_plan_without_memo_has_a_page_too(plan):
    found = parts_of(memo=None, planned=planned(plan))(entries(), {})
    assert "memo" not in rows(found, "The run")
    assert rows(found, "Memory plan of this rank")["found by"] == plan.found_by


def test_a_run_without_its_plan_says_so():
    said = rows(parts_of(planned=planned(None))(entries(), {}), "Memory plan")
    assert said == {"in use": "not yet, or not any more: see below"}


def test_the_course_has_loss_time_and_traffic():
    told = {2: {"D2H bytes": 7.0, "H2D bytes": 5.0}, 4: {"D2H bytes": 8.0}}
    loss, time, swapped = course(entries(), told).panels
    assert loss.lines[0].y == [3.0, 2.0, 1.0] and time.lines[0].y == [0.5, 1.0, 1.5]
    assert [(line.x, line.y) for line in swapped.lines] == [([2, 4], [7.0, 8.0]), ([2], [5.0])]


def test_a_stage_without_losses_and_a_run_without_traffic_show_what_they_have():
    history = History()
    history.add(1, 1.0, None)
    assert [panel.title for panel in course(history.entries(), {}).panels] == ["Time"]


@pytest.mark.parametrize(
    ("changes", "memo"),
    [({"rank": 2}, MemoConfig(0.5)), ({"save": None}, MemoConfig(0.5)), ({}, None)],
)
def test_one_rank_writes_it_and_only_for_runs_of_memo_that_save(changes, memo):
    args = Namespace(**{**vars(ARGS), **changes})
    assert run_page(args, memo, None, None, list) is None


def test_it_lies_beside_plan_and_measurements(tmp_path):
    args = Namespace(**{**vars(ARGS), "save": str(tmp_path)})
    page = run_page(args, MemoConfig(0.5), None, None, list)
    assert page is not None and page._path == Path(tmp_path) / "memo_plan" / "report.html"


def test_writers_get_the_link(monkeypatch):
    board = SimpleNamespace(texts=[], add_text=lambda *told: board.texts.append(told))
    run = SimpleNamespace(summary={})
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: board)
    monkeypatch.setattr(megatron.training, "get_wandb_writer", lambda: SimpleNamespace(run=run))
    telling.link("report", 8, "runs/7b/memo_plan/report.html")
    assert board.texts == [("memo/report", "runs/7b/memo_plan/report.html", 8)]
    assert run.summary == {"memo/report": "runs/7b/memo_plan/report.html"}


def test_a_rank_without_writers_links_nothing(monkeypatch):
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(megatron.training, "get_wandb_writer", lambda: None)
    telling.link("report", 8, "somewhere")
