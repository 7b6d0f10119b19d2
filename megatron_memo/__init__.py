"""Megatron-MEMO: train LLMs on very long contexts by swapping and recomputing token by token."""

__version__ = "0.1.0"
