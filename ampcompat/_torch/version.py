"""Which torch this is."""

from __future__ import annotations

from typing import Final

import torch
from packaging.version import Version

#: Whether this torch is built for AMD GPUs, for which scripts had ROCm's fork of apex.
IS_FOR_ROCM: Final = torch.version.hip is not None
TORCH: Final = Version(torch.__version__.split("+")[0])
