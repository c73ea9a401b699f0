"""What holds on a pretended device; as a program, prints the outcomes of the checks that are named, as JSON."""

import contextlib
import json
import sys
import threading
import traceback
import warnings

import pytest
import torch
import torch.nn.functional as F
from pretended_device import NAME, Backend, Ops, Shell, set_up
from torch.utils._pytree import tree_map


def net(there):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers)
    for module in layers if there else ():
        for name, param in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(Shell(param.detach()))
    return model


MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    **{
        name: lambda params, name=name: getattr(optimizers, name)(params, lr=0.01)
        for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")
    },
}


class Run:
    """A model in training, on the device or on the CPU."""

    def __init__(self, level, make, there, **options):
        reset()
        self.there, self.at = there, 0
        model = net(there)
        self.model, self.optimizer = amp.initialize(
            model, MAKERS[make](model.parameters()), opt_level=level, verbosity=0, **options
        )

    def backward(self, factor=1.0, **options):
        generator = torch.Generator().manual_seed(self.at)
        x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
        if self.there:
            x, y = Shell(x), Shell(y)
        self.at += 1
        with amp.scale_loss(F.cross_entropy(self.model(x), y) * factor, self.optimizer, **options) as scaled:
            scaled.backward()

    def step(self, factor=1.0):
        self.backward(factor)
        self.finish()

    def finish(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *factors):
        for factor in factors:
            self.step(factor)
        return self

    def accumulated(self, **options):
        for _ in range(3):
            self.backward(**options)
            self.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
            self.finish()
        return self

    def weights(self):
        found = [param.detach() for param in amp.master_params(self.optimizer)]
        assert all(isinstance(param, Shell) == self.there for param in found)
        return [param.inside.clone() if self.there else param.clone() for param in found]


INF = float("inf")


def trains_as_on_the_cpu(level, make):
    factors = (1, 1, INF if level in ("O1", "O2") else 1, 1, 1)
    with Ops():
        got = Run(level, make, True).steps(*factors).weights()
    for ours, want in zip(got, Run(level, make, False).steps(*factors).weights(), strict=True):
        # O1's native rules differ by device: a linear layer may be one op or two, each rounded.
        torch.testing.assert_close(ours, want, rtol=0, atol=2e-3 if level in ("O1", "O4") else 0)


ACCUMULATIONS = {
    "plain": {},
    "delayed": {"delay_unscale": True},
    "of two losses": {"loss_id": 1},
    "delayed, of two losses": {"delay_unscale": True, "loss_id": 1},
    "unchecked": {"delay_overflow_check": True},
}


def accumulates_as_on_the_cpu(level, options):
    losses = {"num_losses": 1 + options.get("loss_id", 0)}
    with Ops():
        got = Run(level, "SGD", True, **losses).accumulated(**options).weights()
    for ours, want in zip(got, Run(level, "SGD", False, **losses).accumulated(**options).weights(), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=2e-3 if level == "O1" else 0)


def passes_are_fused(level, make, options):
    with Ops() as ops:
        Run(level, make, True, **options).accumulated()
    assert not ops.unfused, ops.unfused


def later_passes_come_in_chunks(options):
    """What they convert to float32 at once does not grow with the model."""
    counts = []
    for chunks.CHUNK in (64, 2**24):
        with Ops() as ops:
            run = Run("O2", "SGD", True, **options)
            run.backward()
            ops.passes.clear()
            run.backward()
            counts.append(ops.passes.count("aten::_foreach_add_.List"))
    assert counts[0] > counts[1] == 1, counts


def an_overflow_skips_and_halves(level, make):
    with Ops():
        run = Run(level, make, True).steps(1, 1)
        before, scale = run.weights(), amp.state_dict()["loss_scaler0"]["loss_scale"]
        run.step(INF)
        assert amp.step_was_skipped(run.optimizer)
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2
        assert all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))


def waits(level, make, want):
    with Ops() as ops:
        run = Run(level, make, True).steps(*[1] * 6)  # masters are compared by value in their first steps
        ops.waits.clear()
        run.step()
        assert len(ops.waits) == want, ops.waits


def resumes_bitwise(level):
    with Ops():
        run = Run(level, "FusedAdam", True, loss_scale="dynamic").steps(1, 1, INF, 1)
        saved = run.model.state_dict(), run.optimizer.state_dict(), amp.state_dict()
        saved = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, saved)
        want = run.steps(1, 1).weights()
        again = Run(level, "FusedAdam", True, loss_scale="dynamic")
        for target, part in zip((again.model, again.optimizer, amp), saved, strict=True):
            target.load_state_dict(part)
        again.at = 4
        assert all(torch.equal(a, b) for a, b in zip(again.steps(1, 1).weights(), want, strict=True))


def casts_follow_the_lists(level, half):
    with Ops():
        run = Run(level, "SGD", True)
        dtypes = []
        for layer in run.model:
            layer.register_forward_hook(lambda _layer, _given, output: dtypes.append(output.dtype))
        run.step()
        assert dtypes == [half, torch.float32, torch.float32, half]
        narrow, wide = Shell(torch.ones(2, 2, dtype=half)), Shell(torch.ones(2, 2))
        assert torch.mm(wide, wide).dtype == half
        assert torch.exp(narrow).dtype == torch.float32
        assert torch.addcmul(narrow, wide, narrow).dtype == torch.float32
        assert (narrow + wide).dtype == torch.float32
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32  # no model of ours is there


def the_api_of_before_2019_casts_there():
    reset()
    with Ops():
        handle = amp.init()
        wide = Shell(torch.ones(2, 2))
        assert torch.mm(wide, wide).dtype == torch.float16
        model = net(True)
        optimizer = MAKERS["SGD"](model.parameters())
        with handle.scale_loss(model(Shell(torch.ones(4, 8))).float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert model[0].weight.dtype == torch.float32


def disabled_casts_reach_the_engines_thread():
    """Backward bodies of a device run in a thread of the engine's own."""
    seen = []

    class Body(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            wide = Shell(torch.ones(2, 2))
            inside = model(Shell(torch.ones(1, 8))).dtype
            seen.append((torch.mm(wide, wide).dtype, inside, threading.current_thread() is threading.main_thread()))
            return grad

    with Ops():
        model = amp.initialize(net(True)[0], opt_level="O1", verbosity=0)
        loss = Body.apply(Shell(torch.ones(1)).requires_grad_())
        with amp.disable_casts():
            loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        with amp.disable_casts():
            loss.backward()
    off, on = (torch.float32, torch.float32, False), (torch.float16, torch.float16, False)
    assert seen == [off, on, off]


#: The CPU inside has no kernel of these, the device no autocast of its own (attention is on no list of apex).
NOT_PLAYED = {
    "F.ctc_loss",
    "F.scaled_dot_product_attention",
    "nn.BatchNorm1d",
    "nn.GRUCell",
    "nn.LSTMCell",
    "torch.equal",
}


def every_row_has_the_dtype_of_the_lists():
    with Ops(), casts_on(NAME):
        for row in sorted(ROWS.keys() - NOT_PLAYED):
            assert {pair: probe(row, pair, f"{NAME}:0") for pair in PAIRS} == ROWS[row]["expected"], row


def moving_there_afterwards_is_refused():
    """torch cannot change a plain parameter into a shell: it puts another in its place, as on some real devices."""
    run = Run("O2", "SGD", False).steps(1)
    run.there = True
    with Ops(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.model.to(NAME)
        with pytest.raises(RuntimeError, match="move the model before the optimizer is made"):
            run.step()


def a_device_that_cannot_autocast_is_named():
    del Backend.get_amp_supported_dtype
    with Ops(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = Run("O1", "SGD", True).steps(1)
        assert [str(w.message) for w in found if NAME in str(w.message)], [str(w.message) for w in found]
        Run("O2", "SGD", True).steps(1)
    assert run.weights()


CHECKS = {
    **{
        f"{level} {make} as on the CPU": (trains_as_on_the_cpu, level, make)
        for level in ("O0", "O1", "O2", "O4", "O5")
        for make in MAKERS
    },
    "O3 SGD as on the CPU": (trains_as_on_the_cpu, "O3", "SGD"),
    **{
        f"{level} {make} skips": (an_overflow_skips_and_halves, level, make)
        for level in ("O1", "O2")
        for make in MAKERS
    },
    **{f"{level} {make} waits once": (waits, level, make, 1) for level in ("O1", "O2") for make in ("SGD", "Adam")},
    **{
        f"{level} {make} never waits": (waits, level, make, 0)
        for level in ("O0", "O1", "O2")
        for make in MAKERS
        if make.startswith("Fused")
    },
    **{f"{level} resumes": (resumes_bitwise, level) for level in ("O1", "O2", "O5")},
    **{
        f"{level} accumulates, {name}": (accumulates_as_on_the_cpu, level, options)
        for level in ("O1", "O2")
        for name, options in ACCUMULATIONS.items()
    },
    "O5 accumulates, plain": (accumulates_as_on_the_cpu, "O5", {}),
    **{
        f"{level} {make} has fused passes": (passes_are_fused, level, make, {})
        for level in ("O1", "O2", "O3", "O5")
        for make in MAKERS
    },
    "chunks": (later_passes_come_in_chunks, {}),
    "chunks at a scale of one": (later_passes_come_in_chunks, {"loss_scale": 1.0}),
    "O2 SGD has fused passes at a scale of one": (passes_are_fused, "O2", "SGD", {"loss_scale": 1.0}),
    "amp.init": (the_api_of_before_2019_casts_there,),
    "disable_casts": (disabled_casts_reach_the_engines_thread,),
    "moved": (moving_there_afterwards_is_refused,),
    "every row": (every_row_has_the_dtype_of_the_lists,),
    "O1 lists": (casts_follow_the_lists, "O1", torch.float16),
    "O4 lists": (casts_follow_the_lists, "O4", torch.bfloat16),
    "no autocast": (a_device_that_cannot_autocast_is_named,),  # last: the device loses it
}
#: Whether a check is slow: by default O2 has every optimizer, and each of the two others.
SLOW = {
    name: len(words := name.split()) > 1
    and words[1] in MAKERS
    and words[0] != "O2"
    and words[1] not in {"O0": ("SGD", "FusedNovoGrad"), "O1": ("SGD", "FusedAdam")}.get(words[0], ("Adam", "FusedSGD"))
    for name in CHECKS
} | {"O3 SGD as on the CPU": False}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    library = set_up()

    from internals import reset
    from o1_casts import casts_on
    from op_calls import PAIRS, probe
    from op_rows import ROWS

    from ampcompat import amp, optimizers
    from ampcompat.amp.half import chunks

    outcomes = {}
    for name in sorted(sys.argv[1:], key=list(CHECKS).index):
        check, *given = CHECKS[name]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                check(*given)
            outcomes[name] = "passed"
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
