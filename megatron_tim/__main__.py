"""``python -m megatron_tim`` is the command ``megatron-tim``."""

import sys

from megatron_tim.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
