"""A launch script that knows nothing of memo: Megatron's pretrain with the least around it."""

import functools

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def datasets(samples):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


def loss(mask, output):
    mask = mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().clone().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(iterator, model):
    batch = next(iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, functools.partial(loss, batch["loss_mask"])


if __name__ == "__main__":
    parsed = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(parsed, gpt_config_from_args(parsed)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
