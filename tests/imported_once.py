"""What the server of ``process_group.py`` imports once, for all processes that it forks: it takes seconds."""

import amp_training  # noqa: F401
import process_group  # noqa: F401
import torch

import ampcompat.parallel  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch's compiler
