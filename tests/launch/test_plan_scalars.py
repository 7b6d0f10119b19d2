"""What a planned run tells Megatron's writers."""

import megatron.training

from megatron_memo.training import plan_setup


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
    plan_setup._write(7, {"plan hit rate": 1.0, "native mallocs": 0})
    assert board.scalars == [("memo/plan hit rate", 1.0, 7), ("memo/native mallocs", 0, 7)]
    assert wandb.logged == [({"memo/plan hit rate": 1.0, "memo/native mallocs": 0}, 7)]


def test_a_rank_without_writers_tells_nobody(monkeypatch):
    monkeypatch.setattr(megatron.training, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(megatron.training, "get_wandb_writer", lambda: None)
    plan_setup._write(7, {"plan hit rate": 1.0})
