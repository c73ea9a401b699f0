"""The dispatcher: autocast keys, overloads, registrations, half convolutions on the CPU, and watching what runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

# Device types with an autocast key of their own. A torch that does not know a key yet leaves that device type out.
_AUTOCAST_KEYS: Final = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "xla": "AutocastXLA",
    "ipu": "AutocastIPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
}

#: Functions behind the recurrent layers, and behind their cells.
RECURRENT_LAYERS: Final = ("rnn_tanh", "rnn_relu", "gru", "lstm")
RECURRENT_CELLS: Final = ("rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell")

#: Aten overloads by public name, where they are not simply all of aten::name. Empty: no op of the function itself needs
#: a cast, for it is made of others that get theirs (softmin), written in Python, or promoted by torch.
ATEN: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name, "convolution") for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d")},
    "conv_transpose2d": ("conv_transpose2d.input", "convolution"),
    "conv_transpose3d": ("conv_transpose3d.input", "convolution"),
    "prelu": ("prelu", "_prelu_kernel"),
    "norm": (
        *("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype"),
        *("norm.ScalarOpt_dim_dtype", "frobenius_norm.dim", "nuclear_norm.*", "linalg_matrix_norm.*"),
    ),
    "std": ("std.correction",),
    "var": ("var.correction",),
    "softmax": ("softmax.int", "_softmax", "_safe_softmax"),
    "log_softmax": ("log_softmax.int", "_log_softmax"),
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "group_norm": ("group_norm", "native_group_norm"),
    "interpolate": (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
        *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    ),
    "grid_sample": ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    "cross_entropy": ("cross_entropy_loss",),
    "nll_loss": ("nll_loss", "nll_loss2d"),
    "bilinear": ("bilinear", "_trilinear"),
    "cross": ("cross", "linalg_cross"),
    "affine_grid": ("affine_grid_generator",),
    "pinv": ("linalg_pinv.atol_rtol_tensor",),
    **dict.fromkeys(("softmin", "local_response_norm", "normalize", "gaussian_nll_loss", "cpu"), ()),
    **dict.fromkeys(("multilabel_soft_margin_loss", "triplet_margin_with_distance_loss"), ()),
    # torch promotes these itself. It lets a 0-dim tensor widen nothing, where apex did; to follow apex here would cost
    # every addition of a model 5 microseconds and more.
    **dict.fromkeys(("add", "div", "mul", "sub", "eq", "equal", "ge", "gt", "le", "lt", "ne", "cat", "stack"), ()),
}


def autocast_key(device_type: str) -> str | None:
    """The dispatch key of autocast on ``device_type``; None where this torch has none."""
    private = torch._C._get_privateuse1_backend_name()
    key = "AutocastPrivateUse1" if device_type == private else _AUTOCAST_KEYS.get(device_type)
    if key is None or not hasattr(torch._C.DispatchKey, key):
        return None
    return key


def can_autocast(device_type: str) -> bool:
    """Whether this torch can autocast ``device_type``: an added backend too, which has a module saying so."""
    if device_type == torch._C._get_privateuse1_backend_name():
        return hasattr(getattr(torch, device_type, None), "get_amp_supported_dtype")
    return autocast_key(device_type) is not None


def autocast_device_types() -> list[str]:
    """The device types that this torch can autocast."""
    return list(filter(can_autocast, [*_AUTOCAST_KEYS, torch._C._get_privateuse1_backend_name()]))


def overloads_of(name: str) -> list[torch._ops.OpOverload]:
    """The overloads that the public ``name`` stands for: what the table lists, or all of ``aten::name``."""
    return [op for aten in ATEN.get(name) or (f"{name}.*",) for op in aten_overloads(aten)]


def aten_overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of ``aten::name``: "mm" its default one, "sum.dim_IntList" that one, "pow_.*" all but ``out=``."""
    packet_name, _, wanted = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None:
        return []
    if wanted != "*":
        op = getattr(packet, wanted or "default", None)
        return [] if op is None else [op]
    ops = []
    for overload in packet.overloads():
        writes_to_out = "out" in overload.split("_")
        if writes_to_out or "dimname" in overload.lower():
            continue
        op = getattr(packet, overload)
        # TorchScript's own overloads, on strings and lists, are not ops of the dispatcher.
        if torch._C._dispatch_has_kernel(op_name(op)):
            ops.append(op)
    return ops


def op_name(op: torch._ops.OpOverload) -> str:
    """The dispatcher's name of ``op``, as in "aten::sum.dim_IntList"."""
    return str(op.name())  # type: ignore[no-untyped-call]


def ops_with_kernel(key: str) -> frozenset[str]:
    """The names of all ops with something registered at the dispatch key named ``key``."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def keys_excluded(key: str) -> Callable[[], AbstractContextManager[object]]:
    """A factory of regions in which the dispatcher passes over ``key`` (in this thread), as native kernels do."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch._C._ExcludeDispatchKeyGuard, keys)


def composite(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The kernel of ``op`` that is made of other ops, below every rule for ``op`` itself."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not op.has_kernel_for_dispatch_key(key):
        key = torch._C.DispatchKey.CompositeExplicitAutograd
    return functools.partial(op._op_dk, key)


def register_kernels(kernels: Mapping[torch._ops.OpOverload, Callable[..., object]], key: str, undo: ExitStack) -> None:
    """Make each of ``kernels`` the one for its op at the dispatch key named ``key``, until ``undo`` runs."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        # "Overriding a previously registered kernel": that is the intention.
        warnings.simplefilter("ignore")
        for op, kernel in kernels.items():
            library.impl(op, kernel, key)  # type: ignore[no-untyped-call]


def halves_without_cpu_convolution() -> frozenset[torch.dtype]:
    """The half dtypes whose convolutions oneDNN does not compute natively on this processor."""
    supported = {
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
    }
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset(supported)
    return frozenset(dtype for dtype, ask in supported.items() if ask is None or not ask())


def convolve_on_cpu_in_float(emulated: frozenset[torch.dtype], undo: ExitStack) -> None:
    """Compute half convolutions on the CPU in float32, rounded once as on tensor cores, until ``undo`` runs.

    torch's own kernels are tens of times slower than float32's where oneDNN has none: in a dtype that the processor has
    no arithmetic for, and backward in float16 on any. These are registered below autograd: they serve half models and
    casts of functions alike, forward, backward and double backward, eager and compiled.

    Args:
        emulated: The half dtypes that this processor has no arithmetic for.
        undo: Gets the undo.
    """
    # aten::convolution, and the graphs of torch.jit.trace, go through aten::_convolution.
    (forward,) = aten_overloads("_convolution")
    (backward,) = aten_overloads("convolution_backward")
    kernels = {
        forward: _in_float(composite(forward), emulated, emulated),
        backward: _in_float(composite(backward), emulated | {torch.float16}, emulated),
    }
    register_kernels(kernels, "CPU", undo)


def _in_float(
    native: Callable[..., Any], slow: frozenset[torch.dtype], emulated: frozenset[torch.dtype]
) -> Callable[..., Any]:
    """Make a kernel that computes ``native`` in float32 where the tensors are of a ``slow`` dtype.

    The leading three arguments are tensors: input, weight and bias (or None), or gradient, input and weight. For an
    ``emulated`` dtype torch has a forward of its own, whose results are contiguous in 3-d; oneDNN keeps the layout.
    """

    def kernel(*args: Any, **settings: object) -> object:
        tensors = args[:3]
        dtype = args[0].dtype
        if dtype not in slow or any(t is not None and t.dtype is not dtype for t in tensors):
            return native(*args, **settings)  # mixed dtypes: torch's own error
        wide = native(*(None if t is None else t.float() for t in tensors), *args[3:], **settings)
        # The strides of torch's half kernels, as compiled graphs expect.
        contiguous = args[0].dim() == 5 and dtype in emulated
        layout = torch.contiguous_format if contiguous else torch.preserve_format
        if isinstance(wide, torch.Tensor):
            return wide.to(dtype, memory_format=layout)
        return tuple(None if g is None else g.to(dtype, memory_format=layout) for g in wide)

    return kernel


def current_node() -> Any:
    """The node of the autograd graph that the engine runs in this thread; None outside of it."""
    return torch._C._current_autograd_node()


def innermost_dispatch_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees ops first, or None."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


def flop_formula(op: torch._ops.OpOverload) -> Callable[..., int] | None:
    """The formula of torch's flop counter for ``op`` (on tensors, with ``out_val=``); None where it counts nothing."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(op, "overloadpacket", op)
    # The flop counter knows attention on GPUs; attention on CPUs takes its tensors in the same order.
    like = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), packet)
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(like)
    return formula
