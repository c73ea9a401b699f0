"""The boundary of a module that stays float32 inside a model that runs in half: how its forward runs.

Its inputs become float32 and casts are off inside; where the model's weights are half, its outputs go back to half. The
boundary is a policy of the dynamic subclass that makes a model run under amp, so that deepcopy, pickle, DataParallel, a
direct ``module.forward(x)`` and ``torch.compile`` go through it too.
"""

from __future__ import annotations

import torch

from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts.contexts import OFF, casts_off
from ampcompat.amp.casts.trees import cast_tree, tensors_in
from ampcompat.amp.half.devices import model_index
from ampcompat.amp.half.forward import Args, Forward, Kwargs, ModelPolicy
from ampcompat.amp.half.model_class import set_policy


class BoundaryPolicy(ModelPolicy):
    """How a kept module runs; ``output_dtype`` is the half dtype around it, if any."""

    @classmethod
    def for_modules_of(cls, policy: ModelPolicy) -> BoundaryPolicy:
        """Return the boundary of modules in models that run under ``policy``."""
        return cls(
            opt_level=policy.opt_level,
            casts=OFF,
            input_dtype=torch.float32,
            output_dtype=policy.half_dtype,
            master_weights=False,
        )

    def run(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run ``forward`` on float32 inputs, casts off; outputs go back to half unless the inputs were float32."""
        tensors = tensors_in((args, kwargs))
        came_from_half = _may_come_from_half_code(tensors)
        args = cast_tree(args, torch.float32)
        kwargs = cast_tree(kwargs, torch.float32)
        tensors = tensors or list(model.parameters())
        device_type = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device_type):
            with casts_off(device_type):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        if self.output_dtype is None or not came_from_half:
            return output
        return cast_tree(output, self.output_dtype)


def _may_come_from_half_code(inputs: list[torch.Tensor]) -> bool:
    """Whether ``inputs`` may come from a half model, so that what computes with the outputs expects half ones."""
    dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
    if not dtypes:  # integers, as an embedding takes, say nothing of the model around
        return True
    return any(dtype in HALF_DTYPES for dtype in dtypes)


def set_boundary(module: torch.nn.Module, policy: BoundaryPolicy | None) -> None:
    """Put the boundary ``policy`` around ``module``; None takes off the one that is there."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _keep_off_fused_path]:
        del hooks[key]
    set_policy(module, policy)
    if policy is not None:
        model_index.live.discard(module)  # it is a part of a model, and no model itself
        module.register_forward_pre_hook(_keep_off_fused_path)


def _keep_off_fused_path(module: torch.nn.Module, args: object) -> None:
    """Do nothing: torch's fused encoder layer skips its parts' forwards, but not where a part has a hook."""
