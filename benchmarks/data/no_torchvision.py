"""Replace torchvision, which only the image datasets of mosaicml-streaming use, by empty modules.

The torchvision of PyPI cannot be imported with a CPU build of torch. Import this before
`streaming`.
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
