"""The datasets of a GPT run, built by upstream from Megatron's own flags."""

from __future__ import annotations

import functools
import json
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_args, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_memo import compat_versions
from megatron_memo.training.gpt import mtp_here, packs


def built_on_this_rank(vp_stage: int | None = None, is_packed_sequence: bool = False) -> bool:
    """One rank of each tensor-parallel group reads, on the stages that use tokens or labels."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return (
        is_packed_sequence
        or is_first_or_last_pipeline_stage(vp_stage)
        or mtp_here(get_args(), vp_stage)
    )


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Upstream's dataset config (with fill-in-the-middle's additions) from Megatron's flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    settings: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": compat_versions.build_tokenizer(args),
        # which files, and which part of them
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "sequences_per_dataset": sequences_per_dataset,
        # how they are read and indexed
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        # masks and positions
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        # how sequences are shared between ranks
        "data_parallel_size": args.data_parallel_size,
        "context_parallel_size": args.context_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
    }
    if getattr(args, "dataloader_inter_document_masking", False):  # since 0.19
        settings["inter_document_masking"] = True
    if not args.fim_data:
        return GPTDatasetConfig(**settings)
    tokens = {name: getattr(args, f"fim_{name}_token") for name in _FIM_TOKENS}
    return GPTFIMDatasetConfig(
        **settings,
        fim_extra_tokens=tokens,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


_FIM_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


def dataset_class(args: Any) -> type:
    """Upstream's dataset for these flags: SFT, mock, fill-in-the-middle or plain text."""
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def train_valid_test_datasets_provider(
    train_val_test_num_samples: list[int | None], vp_stage: int | None = None
) -> Any:
    """The training, validation and test datasets, each None where this rank builds none.

    Args:
        train_val_test_num_samples: samples of each.
        vp_stage: virtual pipeline stage.
    """
    args = get_args()
    print_rank_0("> building the datasets ...")
    datasets = BlendedMegatronDatasetBuilder(
        dataset_class(args),
        train_val_test_num_samples,
        functools.partial(
            built_on_this_rank,
            vp_stage=vp_stage,
            # A stage in the middle needs the bounds of the sequences.
            is_packed_sequence=packs(args),
        ),
        dataset_config(args),
    ).build()
    print_rank_0("> finished building the datasets")
    return datasets


# Every rank calls the provider; it decides by itself which of them build.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
