"""hlat: composable pre-training experiments on large language models.

One entrypoint, `python -m hlat.train`, fed by config groups, over native PyTorch and
neuronx-distributed. The package itself imports nothing, so that composing a configuration stays
fast.
"""

__version__ = "0.1.0"
