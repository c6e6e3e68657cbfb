"""Two empty names for torchvision, which ``mosaicml.txt`` leaves out; import before what imports it unused.

MosaicML Streaming imports it at its top level, for data sets of its own that nothing here reads.
"""

from __future__ import annotations

import sys
import types

for name, used in {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}.items():
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], used, object)
