"""Random training programs against the slow reference: scale, skips, gradients, masters, checkpoints, all exact."""

import struct

import law_profiles  # noqa: F401 - loads the profile
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_amp import Optimizer, Param, Scaler, is_power_of_two

from ampcompat import amp
from ampcompat._state import state
from ampcompat.amp.masters import masters_of

SHAPES = [(), (1,), (3,), (2, 2), (1, 3)]
HALF = {"O0": None, "O1": None, "O2": torch.float16, "O3": torch.float16, "O4": None, "O5": torch.bfloat16}
# Multiples of 2^-6 that float16 and bfloat16 hold exactly; sums, lr and momentum keep everything exact in float32.
VALUES = st.integers(-63, 63).map(lambda n: n / 64)
COEFFICIENTS = st.integers(-8, 8).map(lambda n: n / 16)
LR, MOMENTUM = 0.125, 0.5


class Holder(torch.nn.Module):
    """Parameters and no arithmetic: the loss is ``sum(c * p)``, so ``c`` is the true gradient."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        for i, one in enumerate(spec["params"]):
            p = torch.nn.Parameter(torch.tensor(one["values"]).reshape(one["shape"]))
            p.requires_grad_(not one["frozen"])
            setattr(self, f"p{i}", p)
        if spec["shared"]:
            self.tied = torch.nn.Module()
            self.tied.again = self.p0

    def forward(self, x):
        return sum((p.float().sum() for p in self.parameters()), x)

    def listed(self):
        return [getattr(self, f"p{i}") for i in range(len(self.spec["params"]))]

    def loss(self, coefficients, poison):
        total = torch.zeros(())
        for p, one, c in zip(self.listed(), self.spec["params"], coefficients, strict=True):
            if c is None:
                continue
            wanted = torch.tensor(c).reshape(one["shape"])
            if one["sparse"]:
                rows = torch.nn.functional.embedding(torch.arange(len(p)).flip(0), p, sparse=True)
                total = total + (rows.float() * wanted.flip(0)).sum()
            else:
                total = total + (p.float() * wanted).sum()
        return total * float("inf") if poison else total


@st.composite
def specs(draw):
    level = draw(st.sampled_from(sorted(HALF)))
    casts = level in ("O2", "O3", "O5")
    masters = draw(st.sampled_from([None, None, True, False])) if level in ("O2", "O3") else None
    kept = masters if masters is not None else level != "O3"
    bfloat16 = level in ("O2", "O3") and kept and draw(st.booleans())
    params = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from(SHAPES))
        # Without masters torch's own CPU optimizers would have to add half sparse tensors, and cannot.
        sparse = len(shape) == 2 and kept and draw(st.booleans())
        size = int(torch.Size(shape).numel())
        values = draw(st.lists(VALUES, min_size=size, max_size=size))
        params.append({"shape": shape, "values": values, "sparse": sparse, "frozen": draw(st.booleans())})
    loss_scale = draw(st.sampled_from(["dynamic", "dynamic", "dynamic", None, 128.0]))
    maximum = draw(st.sampled_from([2.0**24, 2.0**17, 2.0**10, 2.0**4]))
    return {
        "level": level,
        "half": torch.bfloat16 if bfloat16 else HALF[level],
        "masters": masters,
        "rounded": not kept,
        "params": params,
        "shared": draw(st.booleans()),
        "loss_scale": loss_scale,
        "minimum": draw(st.sampled_from([None, None, 1.0, 2.0**4])),
        "maximum": maximum,
        "losses": draw(st.integers(1, 3)),
        "window": draw(st.sampled_from([1, 2, 3, 2000])),
        "optimizers": [draw(st.integers(0, 1)) for _ in params],
        "groups": draw(st.booleans()),
        "late": len(params) > 1 and draw(st.booleans()),  # the last parameter joins by add_param_group
        "batchnorm": draw(st.sampled_from([None, False])) if casts else None,
    }


class Real:
    """The program run by torch under amp."""

    def __init__(self, spec):
        self.spec = spec
        self.model = Holder(spec)
        self.optimizers = []
        self.members = members(spec)
        listed = self.model.listed()
        for numbers in self.members:
            params = [listed[n] for n in numbers if not (spec["late"] and n == len(listed) - 1)]
            if not params:
                continue
            groups = [{"params": params}]
            if spec["groups"] and len(params) > 1:
                groups = [{"params": params[:1]}, {"params": params[1:]}]
            self.optimizers.append(torch.optim.SGD(groups, lr=LR, momentum=momentum_of(spec)))
        amp.initialize(
            self.model,
            self.optimizers,
            opt_level=spec["level"],
            loss_scale=spec["loss_scale"],
            min_loss_scale=spec["minimum"],
            max_loss_scale=spec["maximum"],
            num_losses=spec["losses"],
            keep_batchnorm_fp32=spec["batchnorm"],
            master_weights=spec["masters"],
            cast_model_type=spec["half"] if spec["half"] != HALF[spec["level"]] else None,
            verbosity=0,
        )
        self.scalers = amp._amp_state.loss_scalers
        for scaler in self.scalers:
            scaler._scale_seq_len = spec["window"]
        self.joined = False

    def join(self):
        if not self.joined:
            self.optimizers[0].add_param_group({"params": [self.model.listed()[-1]]})
            self.joined = True

    def copy_through_a_checkpoint(self, order):
        saved = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "amp": amp.state_dict(),
        }
        saved = plain_copy(saved)
        state.reset()
        new = Real(self.spec)
        if self.joined:
            new.join()
        loads = {
            "model": lambda: new.model.load_state_dict(saved["model"]),
            "optimizers": lambda: [o.load_state_dict(s) for o, s in zip(new.optimizers, saved["optimizers"])],
            "amp": lambda: amp.load_state_dict(saved["amp"]),
        }
        for name in order:
            loads[name]()
        return new


def plain_copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: plain_copy(v) for k, v in value.items()}
    return [plain_copy(v) for v in value] if isinstance(value, list) else value


def members(spec):
    """Numbers of the parameters in each optimizer; a late one joins the first."""
    count = len(spec["params"])
    groups = [[n for n in range(count) if spec["optimizers"][n] == i] for i in range(2)]
    if spec["late"]:
        early = [[n for n in g if n != count - 1] for g in groups]
        early = [g for g in early if g]
        early[0] = [*early[0], count - 1]
        return early
    return [g for g in groups if g]


def momentum_of(spec):
    return 0.0 if any(p["sparse"] for p in spec["params"]) else MOMENTUM  # torch: sparse momentum is another rule


def in_half(number):
    """``number`` rounded to float16, by the standard library."""
    return struct.unpack("e", struct.pack("e", number))[0]


class Reference:
    def __init__(self, spec):
        self.spec = spec
        travels = str(spec["half"] or torch.float32)[6:]
        self.params = [Param(list(one["values"]), travels) for one in spec["params"]]
        self.optimizers = [Optimizer([self.params[n] for n in group], LR, momentum_of(spec)) for group in members(spec)]
        dynamic = spec["level"] in ("O1", "O2") and spec["half"] != torch.bfloat16
        loss_scale = spec["loss_scale"] or ("dynamic" if dynamic else 1.0)
        self.scalers = [
            Scaler.make(loss_scale, spec["minimum"], spec["maximum"], spec["window"]) for _ in range(spec["losses"])
        ]
        # As in apex: where nothing is scaled and there are no masters, a block does nothing and counts nothing.
        masters = spec["masters"] if spec["masters"] is not None else spec["level"] in ("O2", "O5")
        self.counts = masters or loss_scale != 1.0

    def step(self, number):
        optimizer = self.optimizers[number]
        optimizer.step()
        if self.spec["rounded"] and not optimizer.skipped:  # no masters: the weights themselves are half
            for param in optimizer.params:
                param.value = [in_half(v) for v in param.value]


def check(real, reference):
    """The laws that hold between any two calls."""
    spec = real.spec
    for ours, theirs in zip(real.scalers, reference.scalers, strict=True):
        assert (ours.loss_scale(), ours._unskipped) == (theirs.scale, theirs.unskipped)
        assert is_power_of_two(theirs.scale)
        if theirs.dynamic:
            assert theirs.scale <= max(spec["maximum"], 2.0**-24)
            assert spec["minimum"] is None or theirs.scale >= min(spec["minimum"], spec["maximum"])
    for master in masters_of(real.model):
        assert torch.equal(master.value.detach().to(master.half.dtype), master.half.detach())
    handed = real.model.state_dict()
    for number, param in enumerate(reference.params):
        got = handed[f"p{number}"]
        assert got.dtype == torch.float32
        assert got.flatten().tolist() == param.value, f"p{number}"


def check_gradients(real, reference):
    """Right after a block: unscaled and true, wherever nothing overflowed."""
    for ours, theirs in zip(real.optimizers, reference.optimizers, strict=True):
        if theirs.pending:
            continue
        held = list(amp.master_params(ours))
        for tensor, param in zip(held, theirs.params, strict=False):
            grad = tensor.grad
            got = None if grad is None else (grad.to_dense() if grad.is_sparse else grad).flatten().tolist()
            assert got == param.grad


def run(spec, draw):
    state.reset()
    if spec["minimum"] is not None and spec["minimum"] > spec["maximum"]:
        spec = {**spec, "minimum": None}
    if spec["late"] and not any(members(spec)[0][:-1]) and len(members(spec)[0]) < 2:
        spec = {**spec, "late": False}
    real, reference = Real(spec), Reference(spec)
    late = len(spec["params"]) - 1 if spec["late"] else None
    check(real, reference)
    for _ in range(draw(st.integers(1, 12))):
        action = draw(st.sampled_from(["block", "block", "block", "step", "step", "forward", "write", "save", "join"]))
        if action == "block":
            block(real, reference, late, draw)
            check_gradients(real, reference)
        elif action == "step":
            number = draw(st.integers(0, len(real.optimizers) - 1))
            overflowed = reference.optimizers[number].pending
            real.optimizers[number].step()
            reference.step(number)
            assert amp.step_was_skipped(real.optimizers[number]) == overflowed == reference.optimizers[number].skipped
            real.optimizers[number].zero_grad()
            reference.optimizers[number].zero_grad()
        elif action == "forward":
            real.model(torch.zeros(()))
        elif action == "write":
            number = draw(st.integers(0, len(reference.params) - 1))
            value = draw(VALUES)
            with torch.no_grad():
                real.model.listed()[number].view(-1)[0] = value
            reference.params[number].value[0] = value
            real.model(torch.zeros(()))
        elif action == "save" and not any(o.pending for o in reference.optimizers):
            for number, one in enumerate(real.optimizers):  # gradients are not part of a checkpoint
                one.zero_grad()
                reference.optimizers[number].zero_grad()
            real = real.copy_through_a_checkpoint(draw(st.permutations(["model", "optimizers", "amp"])))
        elif action == "join" and late is not None:
            real.join()
        check(real, reference)


def block(real, reference, late, draw):
    spec = real.spec
    loss_id = draw(st.integers(0, spec["losses"] - 1))
    scaler = reference.scalers[loss_id]
    chosen = [0] if len(real.optimizers) == 1 else draw(st.sampled_from([[0], [1], [0, 1], [1, 0]]))
    passes = draw(st.integers(1, 3))
    poison = scaler.dynamic and draw(st.integers(0, 4)) == 0
    inside = {n for i in chosen for n in members(spec)[i]}
    if late is not None and not real.joined:
        inside.discard(late)
    sums, overflow = {}, False
    for number in range(passes):
        coefficients = []
        for n, one in enumerate(spec["params"]):
            used = n in inside and not one["frozen"] and draw(st.booleans())
            size = len(one["values"])
            coefficients.append(draw(st.lists(COEFFICIENTS, min_size=size, max_size=size)) if used else None)
            if used:
                sums[n] = [a + b for a, b in zip(sums.get(n, [0.0] * size), coefficients[-1], strict=True)]
        last = number == passes - 1
        targets = [real.optimizers[i] for i in chosen]
        with amp.scale_loss(
            real.model.loss(coefficients, poison and last),
            targets if len(targets) > 1 else targets[0],
            loss_id=loss_id,
            delay_unscale=not last,
        ) as scaled:
            if scaled.requires_grad:
                scaled.backward()
        poisoned = poison and last and any(c is not None for c in coefficients)
        largest = max((abs(s) for values in sums.values() for s in values), default=0.0)
        overflow |= poisoned or exceeds(largest * scaler.scale, spec["half"])
    for i in chosen:
        optimizer = reference.optimizers[i]
        optimizer.block(scaler, [sums.get(n) for n in members(spec)[i]], False)
        optimizer.note(scaler, overflow)
    if reference.counts:
        scaler.update(overflow)


def exceeds(number, half):
    return half is torch.float16 and number > 65504.0


# Programs step without a backward pass, too.
@pytest.mark.filterwarnings("ignore:optimizer.step.. after scale_loss blocks that gave")
@given(data=st.data())
def test_a_training_program_does_what_the_reference_does(data):
    run(data.draw(specs()), data.draw)
