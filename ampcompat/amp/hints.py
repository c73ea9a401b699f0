"""Errors of torch's own that mixed precision provokes, by their texts, and a hint for each: the rule, and the fix.

torch 2.4 to 2.13 have these texts; ``tests/tools/explain/test_torch_errors.py`` provokes them.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from ampcompat import _torch

_HALF = r"(?:c10::|torch\.|torch\.cuda\.)?(?:BFloat16|Half|b?float16)"

_TOO_LARGE = (
    "a number beyond float16, which ends at 65504 - float32 code fills masks with -1e9 and the like - write"
    " torch.finfo(x.dtype).min (or .max) in its place"
)
_WRITE = (
    "values of one dtype are written into a tensor of another, one of them half - torch casts operands, not what is"
    " written by index - write target[index] = source.to(target.dtype), or make the target with dtype=source.dtype"
)
_MIXED = (
    "half and wider tensors met in one op - torch promotes neither in products and layers - cast the one that your code"
    " made (torch.zeros, a buffer, an input that amp did not see, a result in float32 or float64): x.to(other.dtype)"
)
_LOSS = (
    "a loss got its input in one dtype and its target in another - it does not promote them - call it in float32:"
    " criterion(output.float(), target.float())"
)
_NO_KERNEL = "torch has no half kernel of this op here - half precision does not reach it - call it on x.float()"
_NUMPY = "numpy has no bfloat16 - the tensor is half under mixed precision - write x.float().numpy()"
_GRADIENT = (
    "a gradient of one dtype for a tensor of another - half weights have half gradients - write p.grad ="
    " grad.to(p.dtype), or use amp.master_params(optimizer)"
)
_SCALER = (
    "torch's GradScaler beside amp - it refuses half gradients, and amp scales by itself - take the GradScaler out:"
    " with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()"
)
_PROBABILITIES = (
    "probabilities that are not finite: something overflowed before - multinomial refuses them - find it with"
    " `ampcompat run --explain`, and take the softmax of logits.float()"
)
_FFT = "half FFTs exist for sizes that are powers of two, and on GPUs alone - call it on x.float()"
_CROSS_ENTROPY = (
    "binary_cross_entropy under casts - the sigmoid in half is 0 or 1, whose logarithm overflows - use"
    " binary_cross_entropy_with_logits (BCEWithLogitsLoss) without the sigmoid"
)

_SAME = (
    "same d?type|same scalar type|should be the same|dtypes must be the same|expected (?:object of )?scalar type|"
    "expected dtype|type promoting not supported|does not match weight dtype|must have the type"
)
#: Texts, and their hints; the first that matches counts. A text that names no dtype comes from other code as well.
#: ``\A`` keeps a search from starting anew at each character of a text, which may have tens of thousands.
_HINTS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(text), hint)
    for text, hint in (
        (r"value cannot be converted to type (?:c10|at)::(?:Half|BFloat16) without overflow", _TOO_LARGE),
        (r"unsafe to autocast", _CROSS_ENTROPY),
        (r"Index put requires the source and destination dtypes match", _WRITE),
        (r"^(?:index_copy|index_add|index_reduce|put)_\(\): self\b.*\bsource\b", _WRITE),
        (r"scatter\(\): Expected self\.dtype to be equal to src\.dtype", _WRITE),
        (r"masked_scatter: expected self and source to have same dtypes", _WRITE),
        (rf"Expected out tensor to have dtype .*{_HALF}|result type .*{_HALF}.* can't be cast", _WRITE),
        (rf"^Found dtype .*{_HALF}|^Found dtype \w+ but expected {_HALF}", _LOSS),
        (rf"cuFFT only supports|Unsupported dtype {_HALF}", _FFT),
        (rf"not implemented for '?{_HALF}|Low precision dtypes not supported", _NO_KERNEL),
        (r"must be either float or double dtype|doesn't handle types other than float and double", _NO_KERNEL),
        (
            rf"\({_HALF}.*expected a tensor with .* of float, double|only supported for half, float and double",
            _NO_KERNEL,
        ),
        (r"Got unsupported ScalarType BFloat16", _NUMPY),
        (r"assign a gradient with dtype", _GRADIENT),
        (r"Attempting to unscale FP16 gradients", _SCALER),
        (r"probability tensor contains either `inf`, `nan`", _PROBABILITIES),
        (r"mixed dtype|both inputs should have same dtype", _MIXED),
        (rf"(?is:\A(?=.*{_HALF}).*(?:{_SAME}))", _MIXED),
    )
)


#: Kinds of errors that torch raises with these texts. No other error is read.
_KINDS: Final = (RuntimeError, ValueError, TypeError)
#: Hints to errors that a module does not meet in float32.
_OF_MODULES: Final = (_TOO_LARGE, _WRITE, _NO_KERNEL, _FFT)


def hint_for(error: BaseException, module: str = "") -> str | None:
    """Explain an error that mixed precision provokes: what was passed, the rule, the fix. None for any other.

    Args:
        error: Of any kind.
        module: Qualified name of the module it was raised in; "" where that is not known.
    """
    if not isinstance(error, _KINDS):
        return None
    text = str(error)
    hint = next((hint for pattern, hint in _HINTS if pattern.search(text)), None)
    if module and hint in _OF_MODULES:
        return f"{hint}; or keep the module in float32: amp.initialize(..., keep_fp32=[{module!r}])"
    return hint


def add_hint(error: BaseException, model: torch.nn.Module | None = None) -> None:
    """Append a hint, once, to an error of torch's own that mixed precision provokes.

    Args:
        error: An exception; it stays the same object.
        model: The model in whose forward it was raised, if known.
    """
    if hint_for(error) is None:
        return
    notes = getattr(error, "__notes__", "")
    has_note_of_ours = "ampcompat: " in f"{error}{notes}"
    if has_note_of_ours:
        return
    module = "" if model is None else _raised_in(error, model)
    _torch.add_note(error, f"ampcompat: {hint_for(error, module)}.")


def _raised_in(error: BaseException, model: torch.nn.Module) -> str:
    """Name the innermost module of ``model`` in whose method ``error`` was raised; "" where it was in none."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        innermost = names.get(id(owner), innermost)
        trace = trace.tb_next
    return innermost
