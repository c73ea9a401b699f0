"""A picture of all that a call of amp may change, as plain values: what a failed call must leave as it was."""

import torch
from internals import view

import ampcompat


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not torch.is_tensor(value):
        return value
    value = value.detach()
    return f"{value.dtype}{(value.to_dense() if value.is_sparse else value).double().flatten().tolist()}"


def whole_picture(models, optimizers):
    """All that a call of amp may change: casts, classes, weights, masters, gradients, optimizer state, scalers."""
    seen = {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "engine": torch.autograd._engine_run_backward,
        "amp": {name: plain(value) for name, value in view().items()},
        "scalers": ampcompat.amp.state_dict(),
    }
    names = {}
    for number, model in enumerate(models):
        seen[f"{number} modules"] = [(name, type(module).__name__) for name, module in model.named_modules()]
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            names[id(tensor)] = f"{number} {name}"
            seen[f"{number} {name}"] = plain(tensor), plain(tensor.grad)
        # Reading it changes nothing: masters agree with the weights.
        seen[f"{number} state"] = {name: plain(value) for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen[f"optimizer {number} params"] = [(names.get(id(p), "a master"), plain(p), plain(p.grad)) for p in params]
        seen[f"optimizer {number} methods"] = sorted(name for name, value in vars(optimizer).items() if callable(value))
        for index, param in enumerate(params):
            held = optimizer.state.get(param, {})
            seen[f"optimizer {number} state of {index}"] = {name: plain(value) for name, value in held.items()}
    return seen
