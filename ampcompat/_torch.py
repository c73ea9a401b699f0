"""Every private torch call and every version check of the project.

When a new torch breaks something, this is the file to mend.
"""

from __future__ import annotations

from typing import Final

import torch
from packaging.version import Version

TORCH: Final = Version(torch.__version__.split("+")[0])
