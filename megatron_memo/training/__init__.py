"""Megatron's GPT pretraining with memo's flags; ``megatron_memo.training.main.main`` runs it."""
