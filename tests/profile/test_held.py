"""Weights, gradients and optimizer state are told apart by who holds their storages."""

import torch
from torch import nn

from megatron_memo.profile.held import HeldParts


def test_each_storage_counts_once_for_the_part_that_holds_it():
    model = nn.Linear(8, 4)  # 36 numbers
    buffer = torch.zeros(100)
    weight, bias = model.parameters()
    weight.main_grad, bias.main_grad = buffer[:32].view(4, 8), buffer[32:36]
    masters = [p.detach().clone() for p in model.parameters()]
    parts = HeldParts({"cpu"})
    adam = torch.optim.Adam(masters)
    for master in masters:
        master.grad = torch.zeros_like(master)
    try:
        assert parts.bytes_of([model])["optimizer"] == 0  # it has not stepped
        adam.step()
        held = parts.bytes_of([model])
    finally:
        parts.end()
    steps = 2 * 4  # a number of steps for each parameter
    assert held == {"weights": 36 * 4, "gradients": 400, "optimizer": 3 * 36 * 4 + steps}


def test_an_optimizer_that_updates_the_weights_themselves_holds_moments_only():
    model = nn.Linear(8, 4, bias=False)
    parts = HeldParts({"cpu"})
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    adam.step()
    held = parts.bytes_of([model])
    parts.end()
    assert held == {"weights": 128, "gradients": 128, "optimizer": 2 * 128 + 4}
    assert HeldParts({"meta"}).bytes_of([model])["weights"] == 0
