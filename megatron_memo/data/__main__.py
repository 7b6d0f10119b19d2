"""``python -m megatron_memo.data``."""

import sys

from megatron_memo.data.cli import main

if __name__ == "__main__":
    sys.exit(main())
