"""Name types that several packages share."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeAlias

import torch

#: A param group, as torch has it: ``"params"``, and hyperparameters by name.
ParamGroup: TypeAlias = dict[str, Any]
#: ``state`` of an optimizer, as torch has it.
ParamState: TypeAlias = defaultdict[torch.Tensor, Any]
