"""hlat: composable pre-training experiments on large language models.

`hlat train` composes a configuration from groups and trains with native PyTorch or
neuronx-distributed. This module imports nothing, so that composing a configuration is fast.
"""

__version__ = "0.1.0"
