"""Upstream's packed samples on their way to the layer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.utils import flatten_batch_for_packed_sequences
from megatron.training.datasets.sft_dataset import SFTDataset
from torch.utils.data import default_collate

from megatron_memo.ops.packed import bounds_of, is_packed, positions_of
from megatron_memo.training.gpt import BATCH_KEYS, packed_params

SAMPLE = 16


class Tokenizer:
    """As many tokens as a conversation's text says."""

    eod, pad = 1, 0

    def tokenize_conversation(self, conversation, **_options):
        tokens = np.full(int(conversation[-1]["content"]), 7)
        return tokens, tokens


class Conversations(SFTDataset):
    def __init__(self, *samples):
        self.dataset = [
            [{"role": role, "content": str(n)} for n in sample for role in ("system", "user")]
            for sample in samples
        ]
        self.indices = np.arange(len(samples))
        self.config = SimpleNamespace(
            tokenizer=Tokenizer(), sequence_length=SAMPLE, context_parallel_size=1,
            reset_position_ids=False, create_attention_mask=False, reset_attention_mask=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "bounds"),
    [
        # The rest of a sample is padding, part of its last conversation; one too long is cut.
        (((5, 6),), (0, 5, 16)),
        (((5, 6), (3, 20)), (0, 5, 16, 19, 32)),
    ],
)
def test_conversations_are_sequences_of_their_own(samples, bounds):
    dataset = Conversations(*samples)
    batch = dict.fromkeys(BATCH_KEYS) | default_collate([dataset[i] for i in range(len(samples))])
    batch = flatten_batch_for_packed_sequences(batch)
    tokens = SAMPLE * len(samples)
    assert batch["tokens"].shape == (1, tokens)
    params = packed_params(batch, SAMPLE)
    assert is_packed(params)
    assert bounds_of(params, tokens) == bounds
    places = positions_of(params, tokens, torch.device("cpu"))
    assert int(places.max()) < params.max_seqlen_q
