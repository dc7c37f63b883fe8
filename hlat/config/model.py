"""Shape and initialisation of a Llama decoder.

Everything that follows from the shape (head size, group size) is a property, so the YAML holds each
fact once.
"""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING


class ScaledInit(Enum):
    """How the output projections of attention and MLP (o_proj, down_proj) are initialised."""

    none = "none"
    """std, as every other matrix."""
    depth = "depth"
    """std / sqrt(2 L), L = number of layers (the released HLAT scripts)."""
    layer = "layer"
    """std / sqrt(2 l), l = 1-based layer index (HLAT paper, section IV-C)."""


class InitCopies(Enum):
    """What ranks that should hold copies of the same weights must hold."""

    equal = "equal"
    """The same, to the last bit."""
    first = "first"
    """Anything: the first rank's count (NxD 2.29, scripts/checkpoint_converter.py:361, 506)."""


@dataclass
class Model:
    """A pre-norm Llama decoder: RMSNorm, SwiGLU, rotary embedding, grouped-query attention."""

    name: str = MISSING
    """Short name, used in run names and reports."""
    num_layers: int = MISSING
    """Decoder layers."""
    hidden_size: int = MISSING
    """Width of the residual stream."""
    intermediate_size: int = MISSING
    """Width of the SwiGLU product."""
    num_attention_heads: int = MISSING
    """Query heads."""
    num_key_value_heads: int = MISSING
    """Key/value heads; equal to num_attention_heads for multi-head attention."""
    vocab_size: int = MISSING
    """Rows of the embedding and of the output head; at least the tokenizer's size."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    init_std: float = 0.02
    """Standard deviation of every initial matrix."""
    scaled_init: ScaledInit = ScaledInit.depth
    """Scaling of o_proj and down_proj at initialisation."""
    init_from: str | None = None
    """A Hugging Face Llama folder (config.json, *.safetensors), or one in which neuronx-distributed
    (NxD) saved, whose weights a run without checkpoints begins from, at step 0 with a fresh
    optimizer; null: random initial values."""
    init_copies: InitCopies = InitCopies.equal
    """Of an NxD folder alone: whether norms and key/value heads that several ranks saved must be
    equal, or the first rank's are taken, as NxD's own converter does."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads
