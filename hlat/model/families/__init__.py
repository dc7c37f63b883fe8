"""Model families of Hugging Face transformers, without torch. A family is one file and one line."""

from hlat.model.families import (
    arcee,
    gemma2,
    gemma3,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from hlat.model.families.family import Family

_MODULES = (
    *(llama, qwen2, qwen3, mistral, olmo2, olmo3, gemma2, gemma3, smollm3, arcee),
    *(mixtral, qwen3_moe, olmoe),
)

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""Supported families by value of model.family."""

FAMILY_NAMES: tuple[str, ...] = tuple(FAMILIES)
"""Values of model.family."""
