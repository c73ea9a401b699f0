"""Mixed precision for a model, with plain torch."""

import torch


def mixed_precision(model, enabled=True, dtype=torch.float16, loss_scale=None):
    """Run the forward of a model, or of each in a list, under autocast, and return the scaler for its losses.

    Weights stay float32, and so is what forward returns. Methods other than forward are not touched, and copies and
    pickles of the model are plain. loss_scale is a number, or None for dynamic scaling.
    """
    models = model if isinstance(model, (list, tuple)) else [model]
    device_type = next(p.device.type for m in models for p in m.parameters())
    for module in models if enabled else []:
        module.__class__ = under_autocast(type(module), device_type, dtype)
    fixed = {}
    if loss_scale not in (None, "dynamic"):
        fixed = {"init_scale": float(loss_scale), "growth_interval": 2**31 - 1}
    scaled = bool(enabled) and dtype == torch.float16 and fixed.get("init_scale") != 1
    return torch.amp.GradScaler(device_type, enabled=scaled, **fixed)


def under_autocast(plain, device_type, dtype):
    """Return a subclass of a module's class whose forward runs under autocast and returns float32."""

    class Autocast(plain):
        def forward(self, *args, **kwargs):
            with torch.autocast(device_type, dtype):
                return to_float32(plain.forward(self, *args, **kwargs))

        def __reduce_ex__(self, protocol):
            return (plain.__new__, (plain,), *plain.__reduce_ex__(self, protocol)[2:])

    Autocast.__name__ = plain.__name__
    return Autocast


def to_float32(value):
    """Return a value with the half tensors in it as float32; dicts and dataclasses are changed themselves."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, (list, tuple)):
        items = map(to_float32, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = to_float32(item)
    elif hasattr(type(value), "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            object.__setattr__(value, name, to_float32(getattr(value, name)))
    return value
