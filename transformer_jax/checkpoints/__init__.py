"""Write and read training checkpoints and run folders, whole or not at all.

`checkpoint` is the container of arrays with its checksums, `run_folder` the folder that
`train.py` writes. Published checkpoints of other libraries are in `pretrained`.
"""

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.checkpoints.run_folder import RunFolder

__all__ = ["CheckpointError", "RunFolder"]
