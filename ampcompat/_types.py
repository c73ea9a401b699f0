"""Name types that several packages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

#: A param group, as torch has it: ``"params"``, and hyperparameters by name.
ParamGroup: TypeAlias = dict[str, Any]
#: What an optimizer is made of. torch's ``ParamsT`` is a union of iterables, of which mypy does not infer the type of a
#: list of groups in a call.
Params: TypeAlias = Iterable[torch.Tensor | ParamGroup | tuple[str, torch.Tensor]]
#: ``state`` of an optimizer, as torch has it.
ParamState: TypeAlias = defaultdict[torch.Tensor, Any]
