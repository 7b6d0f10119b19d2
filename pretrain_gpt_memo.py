#!/usr/bin/env python3
"""Pretrain a GPT with Megatron and memo: ``torchrun ... pretrain_gpt_memo.py MEGATRON-FLAGS``.

Takes every flag of Megatron's own launch script, and memo's: see ``--help``, group "memo".
"""

if __name__ == "__main__":
    # Not at the top: Megatron's checkpoint writer starts processes that import this file again,
    # and they need none of this.
    from megatron_memo.training.main import main

    main()
