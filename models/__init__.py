"""Sparse-attention language models in flax NNX; their KV lives in a history that the caller gives."""

from pathlib import Path

from models.config import ModelConfig, RopeConfig
from models.decoder import Decoder
from models.mtp import MtpLayer
from models.tensor_files import CheckpointError
from models.weights import abstract_model, init_model, load_checkpoint, save_checkpoint

TINY = Path(__file__).parent / "tiny"
"""The trained byte-level model that ships with this project, in hub layout; its README is the model card."""

__all__ = [
    "TINY",
    "CheckpointError",
    "Decoder",
    "ModelConfig",
    "MtpLayer",
    "RopeConfig",
    "abstract_model",
    "init_model",
    "load_checkpoint",
    "save_checkpoint",
]
