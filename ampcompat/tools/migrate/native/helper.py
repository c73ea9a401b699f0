"""The function that a migrated script gets: its text is pasted from here, below the imports."""

import copy
import dataclasses

import torch


def mixed_precision(model, enabled=True, dtype=torch.float16, loss_scale=None):
    """Run the forward of a model, or of each in a list, under autocast, and return the scaler for its losses.

    Weights stay float32, and so is what forward returns. Methods other than forward are not touched. A pickle
    (torch.save(model)) holds the plain model. loss_scale is a number, or None for dynamic scaling.
    """
    models = model if isinstance(model, (list, tuple)) else [model]
    device_type = next(p.device.type for m in models for p in m.parameters())
    for module in models if enabled else []:
        module.__class__ = under_autocast(type(module), device_type, dtype)
    options = {}
    if loss_scale not in (None, "dynamic"):
        options = {"init_scale": float(loss_scale), "growth_interval": 2**31 - 1}
    scaled = bool(enabled) and dtype == torch.float16 and options.get("init_scale") != 1
    return torch.amp.GradScaler(device_type, enabled=scaled, **options)


def under_autocast(plain, device_type, dtype):
    """Return a subclass of a module's class whose forward runs under autocast and returns float32."""

    def forward(self, *args, **kwargs):
        with torch.autocast(device_type, dtype):
            output = plain.forward(self, *args, **kwargs)
        return to_float32(output)

    def __reduce_ex__(self, protocol):
        state = plain.__reduce_ex__(self, protocol)[2:]
        return (plain.__new__, (plain,), *state)

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = plain.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    methods = {"forward": forward, "__reduce_ex__": __reduce_ex__}
    if not hasattr(plain, "__deepcopy__"):
        methods["__deepcopy__"] = __deepcopy__
    return type(plain.__name__, (plain,), {**methods, "__module__": plain.__module__})


def to_float32(value):
    """Return a value with the half tensors in it as float32: in lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_float32, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_float32, value))
    if isinstance(value, dict):
        value = copy.copy(value)
        for key, item in value.items():
            value[key] = to_float32(item)
    elif dataclasses.is_dataclass(value):
        value = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, to_float32(getattr(value, field.name)))
    return value
