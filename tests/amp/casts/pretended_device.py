"""A second device, made of Python: what ampcompat does there, op by op, on a machine that has none.

torch lets a backend of Python stand for a device of its own ("privateuseone"). Its tensors are shells that claim to lie
there; each op runs on the CPU tensors inside of them, and raises, as on a real device, where tensors of the two meet.
:func:`set_up` changes torch for good: ``pretended_checks.py`` is a program of its own.
"""

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME = "pretended"


class Event:
    """All work is done at once."""

    def record(self, stream):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


class Backend(getattr(backend_registration, "_DummyBackendModule", object)):  # older torch: not used
    """What torch asks of a device's module."""

    Event = Event

    def current_stream(self, device):
        return None

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Shell(torch.Tensor):
    """A tensor that claims to lie on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=f"{NAME}:0",
        )

    def __init__(self, inside):
        self.inside = inside

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.inside = value.inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return on_device(func, args, kwargs or {})


class Ops(TorchDispatchMode):
    """Has factory functions make shells too, and notes when the host waits, and passes that are not fused."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.passes = []
        self.unfused = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = on_device(func, args, kwargs)
        given = [isinstance(tensor, Shell) for tensor in tensors_in(args)]
        if func.name() in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero") and any(given):
            self.waits.append(func.name())
        elif func.name() == "aten::_to_copy" and not kwargs.get("non_blocking"):
            if given[0] != isinstance(result, Shell):  # from host to device too: of pageable memory
                self.waits.append(func.name())
        elif func.name() == "aten::copy_" and given[0] != given[1]:
            self.waits.append(func.name())
        if func.name().startswith("aten::_foreach_"):
            self.passes.append(func.name())
            # torch's kernels take a launch for each tensor then, unless they copy.
            if "copy" not in func.name() and len({tensor.dtype for tensor in tensors_in(args)}) > 1:
                self.unfused.append(func.name())
        return result


def mapped(change, value):
    """``value``, arguments or results of an op, with ``change`` made to its leaves; torch's ``tree_map``, in little."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, one) for one in value])
    if isinstance(value, dict):
        return {name: mapped(change, one) for name, one in value.items()}
    return change(value)


def tensors_in(value):
    found = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found


def on_device(func, args, kwargs):
    """Run ``func`` inside of the shells; the result is in a shell where it would lie on the device."""
    tensors = tensors_in((args, kwargs))
    shells = [tensor for tensor in tensors if isinstance(tensor, Shell)]
    there = bool(shells)
    inside, named = mapped(lambda leaf: leaf.inside if isinstance(leaf, Shell) else leaf, (args, kwargs))
    if named.get("device") is not None:
        there = torch.device(named["device"]).type == NAME
        named["device"] = torch.device("cpu")
    elif func.name() not in ("aten::copy_", "aten::_to_copy") and shells:
        strangers = [t for t in tensors if not isinstance(t, Shell) and t.dim()]
        if strangers:
            raise RuntimeError(f"{func.name()}: expected all tensors to be on the same device")
    results = func(*inside, **named)
    if not there:
        return results
    shelled = mapped(lambda leaf: Shell(leaf) if isinstance(leaf, torch.Tensor) else leaf, results)
    return return_and_correct_aliasing(func, args, kwargs, shelled)


def set_up():
    """Make the device known to torch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # as every backend that can autocast
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot become a shell in place
    return library
