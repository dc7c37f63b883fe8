"""Shape, components and initialization of a decoder.

The settings of a component are in its specification, hlat/model/*_spec.py.
"""

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING

from hlat.config.bounds import bounded
from hlat.model import moe_spec as moe_spec  # registers its specification
from hlat.model.attention_spec import AttentionConfig
from hlat.model.decoder_spec import ScaledInit
from hlat.model.embedding_spec import EmbeddingConfig, HeadConfig
from hlat.model.mlp_spec import MLPConfig
from hlat.model.norm_spec import NormConfig
from hlat.model.parametrization_spec import ParametrizationConfig
from hlat.model.rope_spec import RopeConfig


class InitCopies(Enum):
    """Requirement on replicated weights in a neuronx-distributed checkpoint."""

    equal = "equal"
    """Bitwise equal on all ranks."""
    first = "first"
    """Any values; the first rank's apply (NxD 2.29, scripts/checkpoint_converter.py:361, 506)."""


@dataclass
class ModelConfig:
    """A decoder-only transformer; the default components are those of Llama."""

    name: str = MISSING
    """Short name, used in run names and reports."""
    num_layers: int = bounded(min=1, max=10_000)
    """Decoder layers."""
    hidden_size: int = bounded(min=1)
    """Width of the residual stream."""
    intermediate_size: int = bounded(min=1)
    """Width of the hidden layer of the MLP."""
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
    family: str = "llama"
    """Hugging Face model type that config.json of an export has (docs/models.md)."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention: head size, biases, QK-norm, sliding window."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embedding."""
    norm: NormConfig = field(default_factory=NormConfig)
    """RMSNorm and its placement."""
    mlp: MLPConfig = field(default_factory=MLPConfig)
    """Feed-forward network."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """Token embedding."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """Output head and loss."""
    parametrization: ParametrizationConfig = field(default_factory=ParametrizationConfig)
    """Dependence of settings on width and depth (docs/parametrization.md)."""
    residual_multiplier: float = bounded(1.0, above=0, below=float("inf"))
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    init_std: float = bounded(0.02, above=0, below=float("inf"))
    """Standard deviation of every initial matrix."""
    scaled_init: ScaledInit = ScaledInit.depth
    """Scaling of o_proj and down_proj at initialization."""
    init_from: str | None = None
    """Hugging Face directory of a supported family (config.json, *.safetensors) or
    neuronx-distributed (NxD) checkpoint directory with the initial weights of a run without
    checkpoints, which starts at step 0 with a fresh optimizer; null: random initialization."""
    init_copies: InitCopies = InitCopies.equal
    """For an NxD directory only: require equal copies of norms and replicated key/value heads, or
    use the first rank's, as NxD's converter does."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.attention.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads
