"""Frozen, validated dataclasses that configure models, adapters and training runs.

The package imports only the standard library and does not create arrays or modules. `models` builds
a model from its config.
"""

from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.block import CustomBlock
from transformer_jax.config.experts import Experts
from transformer_jax.config.fields import ConfigError
from transformer_jax.config.inputs import Frames, Inputs, Patches, Vectors
from transformer_jax.config.kinds import later, register
from transformer_jax.config.lora import LoraConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.config.mixers import GatedDelta, LatentAttention, ShortConv
from transformer_jax.config.model import (
    Activation,
    DType,
    Kind,
    ModelConfig,
    Norm,
    NormOrder,
    Pooler,
    Remat,
)
from transformer_jax.config.optimizers import (
    SGD,
    Adafactor,
    AdamW,
    Lion,
    Muon,
    Optimizer,
    ScheduleFree,
)
from transformer_jax.config.positions import (
    Alibi,
    CustomPositions,
    Learned,
    Positions,
    Rope,
    RopeScaling,
    Shaw,
    Sinusoidal,
    T5Buckets,
)
from transformer_jax.config.presets import PRESETS, fine_tuning, preset, train_preset
from transformer_jax.config.train import Tokenizer, TrainConfig

__getattr__, __dir__ = later(
    __name__,
    {
        "Cell": "transformer_jax.lectures.recurrent",
        "ContextUse": "transformer_jax.lectures.recurrent",
        "ConvolutionConfig": "transformer_jax.lectures.convolution",
        "NgramConfig": "transformer_jax.lectures.ngram",
        "RecurrentConfig": "transformer_jax.lectures.recurrent",
        "StateAttention": "transformer_jax.lectures.recurrent",
        "WindowConfig": "transformer_jax.lectures.window",
    },
)

__all__ = [
    "PRESETS",
    "SGD",
    "Activation",
    "Adafactor",
    "AdamW",
    "Alibi",
    "AnyModelConfig",
    "Cell",
    "ConfigError",
    "ContextUse",
    "ConvolutionConfig",
    "CustomBlock",
    "CustomPositions",
    "DType",
    "Experts",
    "Frames",
    "GatedDelta",
    "Inputs",
    "Kind",
    "LatentAttention",
    "Learned",
    "Lion",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "Muon",
    "NgramConfig",
    "Norm",
    "NormOrder",
    "Optimizer",
    "Patches",
    "Pooler",
    "Positions",
    "RecurrentConfig",
    "Remat",
    "Rope",
    "RopeScaling",
    "ScheduleFree",
    "Shaw",
    "ShortConv",
    "Sinusoidal",
    "StateAttention",
    "T5Buckets",
    "Tokenizer",
    "TrainConfig",
    "Vectors",
    "WindowConfig",
    "fine_tuning",
    "preset",
    "register",
    "train_preset",
]
