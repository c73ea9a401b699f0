"""Which torch this is."""

from __future__ import annotations

from typing import Final

import torch
from packaging.version import Version

TORCH: Final = Version(torch.__version__.split("+")[0])
