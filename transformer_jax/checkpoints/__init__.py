"""Training checkpoints and run folders, written atomically.

`checkpoint` stores arrays with checksums. `run_folder` manages the folder that `train.py` writes.
For published checkpoints, see `pretrained`.
"""

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import RunFolder

__all__ = ["CheckpointError", "RunFolder"]
