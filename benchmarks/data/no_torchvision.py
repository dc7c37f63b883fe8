"""Let mosaicml-streaming be imported without torchvision, which only its image data sets use.

PyPI's torchvision does not load beside a CPU build of torch. Import this before `streaming`.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

for _name in (
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.transforms.functional",
):
    _module = ModuleType(_name)
    _module.__spec__ = ModuleSpec(_name, None)
    _module.VisionDataset = _module.to_tensor = object  # type: ignore[attr-defined]
    sys.modules.setdefault(_name, _module)
