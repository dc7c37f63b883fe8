"""Shape and initialization of a Llama decoder."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from hlat.config.bounds import bounded


class ScaledInit(Enum):
    """Initialization of the output projections of attention and MLP (o_proj, down_proj)."""

    none = "none"
    """std, as for all other matrices."""
    depth = "depth"
    """std / sqrt(2 L), L = number of layers (the released HLAT scripts)."""
    layer = "layer"
    """std / sqrt(2 l), l = 1-based layer index (HLAT paper, section IV-C)."""


class InitCopies(Enum):
    """Requirement on replicated weights in a neuronx-distributed checkpoint."""

    equal = "equal"
    """Bitwise equal on all ranks."""
    first = "first"
    """Any values; the first rank's apply (NxD 2.29, scripts/checkpoint_converter.py:361, 506)."""


@dataclass
class ModelConfig:
    """A pre-norm Llama decoder: RMSNorm, SwiGLU, rotary embedding, grouped-query attention."""

    name: str = MISSING
    """Short name, used in run names and reports."""
    num_layers: int = bounded(min=1)
    """Decoder layers."""
    hidden_size: int = bounded(min=1)
    """Width of the residual stream."""
    intermediate_size: int = bounded(min=1)
    """Width of the SwiGLU hidden layer."""
    num_attention_heads: int = bounded(min=1)
    """Query heads."""
    num_key_value_heads: int = bounded(min=1)
    """Key/value heads; equal to num_attention_heads for multi-head attention."""
    vocab_size: int = bounded(min=1)
    """Rows of the embedding and of the output head; at least the tokenizer's size."""
    rope_theta: float = bounded(10000.0, above=0, below=float("inf"))
    """Base of the rotary frequencies."""
    rms_norm_eps: float = bounded(1e-5, above=0, below=float("inf"))
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    init_std: float = bounded(0.02, above=0, below=float("inf"))
    """Standard deviation of every initial matrix."""
    scaled_init: ScaledInit = ScaledInit.depth
    """Scaling of o_proj and down_proj at initialization."""
    init_from: str | None = None
    """Hugging Face Llama directory (config.json, *.safetensors) or neuronx-distributed (NxD)
    checkpoint directory with the initial weights of a run without checkpoints, which starts at step
    0 with a fresh optimizer; null: random initialization."""
    init_copies: InitCopies = InitCopies.equal
    """For an NxD directory only: require equal copies of norms and replicated key/value heads, or
    use the first rank's, as NxD's converter does."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads
