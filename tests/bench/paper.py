"""What a training step should cost on a GPU, on paper: counted on a CPU, with a vendor's published rates.

Each op that reaches the dispatcher is taken as one kernel (views and allocations as none, fused passes over lists as
one for every chunk that torch's multi-tensor kernels take). Its bytes are those of the tensors that it reads and
writes, its products those that ``torch.utils.flop_counter`` counts. Two small batches are counted, and every op is
extrapolated to the batch of a GPU. Nothing is measured.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ampcompat import _torch
from ampcompat.amp import cpu_convolution, gradients
from tests.counting import SYNCS
from tests.internals import reset

from . import report
from .loops import Case, make_step
from .models import MODELS
from .report import Section

#: NVIDIA's data sheet of the H100 SXM: memory in bytes per second; dense products per second on tensor cores.
BYTES_PER_SECOND = 3.35e12
PRODUCTS_PER_SECOND = {torch.float16: 989e12, torch.bfloat16: 989e12, torch.float32: 67e12}
#: Seconds that the host needs for a kernel launch from eager PyTorch: usual figures are 3 to 5 µs.
LAUNCH = 4e-6
#: Tensors that torch's multi-tensor kernels take in one launch, by the number of lists; and elements (320 blocks).
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
ELEMENTS_PER_LAUNCH = 320 * 65536

#: The models of the GPU rows whose ops on a CPU are those of a GPU (an LSTM is one kernel of cuDNN's there), with the
#: input of a step that only warms up.
COUNTED = {
    "MLP": (1, 4096),
    "many small": (1, 64),
    "ResNet-50-like": (2, 3, 32, 32),
    "BERT-base-like": (1, 8),
}
VARIANTS = ("native", "hand-written masters", "O1", "O2")
NO_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
NO_KERNEL |= {"aten::_unsafe_view", "aten::lift_fresh", "aten::resize_", "aten::set_"}
#: Overwrite their first argument without reading it.
OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_")


@dataclass
class Op:
    """One op of a step."""

    name: str
    launches: int
    bytes: float
    products: float
    dtype: torch.dtype


class Tally(TorchDispatchMode):
    """Notes every op below autograd and autocast, and host waits."""

    def __init__(self):
        super().__init__()
        self.ops, self.waits = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.name().partition(".")[0]
        self.waits += name in SYNCS
        if not (func.is_view or name in NO_KERNEL or name in SYNCS):
            read = _tensors((args[1:] if name in OVERWRITES else args, kwargs))
            aliases = [argument.alias_info for argument in func._schema.arguments]
            changed = [v for v, alias in zip(args, aliases) if alias is not None and alias.is_write]
            written = {id(t): t for t in _tensors((out, changed))}.values()
            count = flop_registry.get(func._overloadpacket)
            products = count(*args, **kwargs, out_val=out) / 2 if count else _attention(name, args)
            lists = [
                arg for arg in (*args, *kwargs.values()) if _is_list(arg) and arg[0].dim()
            ]  # not counters of steps
            dtype = next((t.dtype for t in read if t.is_floating_point()), torch.float32)
            self.ops.append(Op(name, _launches(lists), sum(map(_bytes, (*read, *written))), products, dtype))
        return out


def _is_list(value):
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(t, torch.Tensor) for t in value)


def _tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor):
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _launches(lists):
    if not lists:
        return 1
    tensors = math.ceil(len(lists[0]) / TENSORS_PER_LAUNCH.get(len(lists), 30))
    return max(tensors, math.ceil(sum(t.numel() for t in lists[0]) / ELEMENTS_PER_LAUNCH))


def _attention(name, args):
    """Products of the CPU's fused attention, which the flop counter does not know: two forward, five backward."""
    if "scaled_dot_product" not in name:
        return 0
    backward = "backward" in name
    query, key = args[backward], args[backward + 1]
    return (5 if backward else 2) * query.numel() * key.shape[-2]


def count(model, variant, optimizer="AdamW(fused)"):
    """The ops of a step at a GPU's batch, and its host waits."""
    reset()
    torch.manual_seed(0)
    build, shape = MODELS[model][1]
    cpu_convolution.acquire()  # for plain torch too: the ops that are counted are the same
    x, y = torch.randn(COUNTED[model]), torch.zeros(COUNTED[model][0], dtype=torch.long)
    step = make_step(variant, Case(model, torch.float16, optimizer), build(), x, y)
    for _ in range(8):  # masters are compared by value in the first ones
        step()
    tallies = []
    for batch in (2, 4):
        x.resize_(batch, *shape[1:]).normal_()
        y.resize_(batch).zero_()
        with Tally() as tally:
            step()
        tallies.append(tally)
    reset()
    few, more = (tally.ops for tally in tallies)
    ops = [_extrapolated(a, b, (shape[0] - 2) / 2) for a, b in zip(few, more, strict=True)]
    return ops, tallies[0].waits


def _extrapolated(few, more, times):
    assert few.name == more.name, "two batches have the same ops"
    moved, products = (a + (b - a) * times for a, b in ((few.bytes, more.bytes), (few.products, more.products)))
    return Op(few.name, few.launches, moved, products, few.dtype)


def device_seconds(ops):
    """Time that the kernels need at least: each at the rate of the memory or of the arithmetic, whichever is slower."""
    return sum(max(op.bytes / BYTES_PER_SECOND, 2 * op.products / PRODUCTS_PER_SECOND[op.dtype]) for op in ops)


def section(device, quick):
    """The tables of counts and of predictions."""
    # Count what a GPU launches: its host cannot read the scale without waiting.
    gradients.CPU_CHUNK, _torch.host_value = gradients.CHUNK, lambda number: None
    _torch.float32_copies = _torch.fused_float32_copies
    rows, predicted = [], []
    for model in list(COUNTED)[:2] if quick else COUNTED:
        seconds = {}
        for variant in VARIANTS:
            ops, waits = count(model, variant)
            _, waits_unfused = count(model, variant, "SGD") if model in ("MLP",) else (None, "")
            launches, on_device = sum(op.launches for op in ops), device_seconds(ops)
            seconds[variant] = on_device, launches * LAUNCH
            gigabytes = sum(op.bytes for op in ops) / 1e9
            counts = [f"{launches:,}", f"{gigabytes:.2f}", f"{sum(op.products for op in ops) / 1e12:.3f}", waits]
            rows.append([model, variant, *counts, waits_unfused, *(f"{1e3 * t:.2f}" for t in seconds[variant])])
            report.progress(f"{model}, {variant}: {rows[-1]}")
        cells = [_ratio(seconds, *pair) for pair in RATIOS]
        predicted.append([model, *cells, "kernels" if seconds["native"][0] > seconds["native"][1] else "launches"])
    heads = ["model", "variant", "launches", "GB moved", "10¹² products", "host waits", "with SGD"]
    text = "### Counted\n\n" + report.table([*heads, "kernels, ms at least", "launches, ms"], rows)
    heads = ["model", *(f"{ours} / {theirs}" for ours, theirs in RATIOS), "native is bound by"]
    return Section(text + "\n### Predicted step time\n\n" + report.table(heads, predicted))


RATIOS = (("O1", "native"), ("O2", "native"), ("O2", "hand-written masters"))


def _ratio(seconds, ours, theirs):
    return f"{max(seconds[ours]) / max(seconds[theirs]):.3f}"
