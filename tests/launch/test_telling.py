"""What a run tells Megatron's writers and timers."""

from argparse import Namespace

import megatron.training
import pytest

from megatron_memo.training import telling


class Board:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, iteration):
        self.scalars.append((name, value, iteration))


class Wandb:
    def __init__(self):
        self.logged = []

    def log(self, values, iteration):
        self.logged.append((values, iteration))


def test_scalars_go_to_both_writers_under_memo(monkeypatch):
    board, wandb = Board(), Wandb()
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: board)
    monkeypatch.setattr(megatron.training, "get_wandb_writer", lambda: wandb)
    telling.write(7, {"plan hit rate": 1.0, "native mallocs": 0})
    assert board.scalars == [("memo/plan hit rate", 1.0, 7), ("memo/native mallocs", 0, 7)]
    assert wandb.logged == [({"memo/plan hit rate": 1.0, "memo/native mallocs": 0}, 7)]


def test_a_rank_without_writers_tells_nobody(monkeypatch):
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(megatron.training, "get_wandb_writer", lambda: None)
    telling.write(7, {"plan hit rate": 1.0})


class Timers:
    def __init__(self):
        self.set, self.logged = {}, []

    def __call__(self, name, log_level):
        assert log_level == 1
        timers = self

        class Timer:
            def set_elapsed(self, value):
                timers.set[name] = value

        return Timer()

    def log(self, names, normalizer):
        self.logged.append((names, normalizer))


@pytest.mark.parametrize(("level", "logged"), [(0, []), (1, [(["memo-exposed-d2h"], 5)])])
def test_timers_are_set_where_megatron_logs_any(monkeypatch, level, logged):
    timers = Timers()
    monkeypatch.setattr(megatron.training, "get_timers", lambda: timers)
    monkeypatch.setattr(megatron.training, "get_args", lambda: Namespace(timing_log_level=level))
    telling.time({"memo-exposed-d2h": 2.5}, 5)
    assert timers.logged == logged
    assert timers.set == ({"memo-exposed-d2h": 2.5} if logged else {})


def test_nothing_to_time_is_not_logged():
    telling.time({}, 5)  # asks Megatron for nothing, which is not set up here
