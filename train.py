"""Training command; run `python train.py --help` for its options.

In an installed package, the same command is `python -m transformer_jax train`.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports prints no traceback

import sys
from collections.abc import Sequence

from transformer_jax.cli import train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return train.main(argv, train.SCRIPT)


if __name__ == "__main__":
    sys.exit(main())
