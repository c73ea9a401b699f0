"""Random training programs under amp against the slow reference: weights, gradients, scales and skips, all to the bit.

A program that fails is named by its seed: ``pytest "tests/laws/test_training_laws.py::test_a_program[17]"``.
"""

import contextlib
import copy
import io

import programs
import pytest
import torch
from comparing import assert_runs, check
from fixed_programs import CONFIG, JOIN, STALE, TOGETHER, block, clear, step
from internals import reset
from law_profiles import SEEDS
from reference_amp import Raised, Reference

from ampcompat import amp

# Programs make every mistake that there is a warning for.
pytestmark = [pytest.mark.device, pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


class Real:
    """A run of a program, by torch under amp."""

    def __init__(self, config):
        self.config = config
        self.saved, self.skipped = {}, None
        self.make(seed=0)

    def make(self, seed):
        config = self.config
        self.away = []
        reset()
        self.models, self.weights = programs.build(config, seed)
        self.optimizers = programs.make_optimizers(config, self.weights)
        amp.initialize(
            self.models,
            self.optimizers,
            opt_level=config["level"],
            loss_scale=config["loss_scale"],
            min_loss_scale=config["minimum"],
            max_loss_scale=config["maximum"],
            num_losses=config["losses"],
            keep_batchnorm_fp32=config["batchnorm"],
            master_weights=config["masters"],
            cast_model_type=torch.bfloat16 if config["bfloat16"] else None,
            verbosity=0,
        )
        for scaler in amp._amp_state.loss_scalers:
            scaler._scale_seq_len = config["window"]

    def seen(self):
        found = {f"weight {n}": w.detach() for n, w in enumerate(self.weights)}
        found |= {f"p.grad of weight {n}": w.grad for n, w in enumerate(self.weights)}
        for number, one in enumerate(self.optimizers):
            for index, p in enumerate(p for group in one.param_groups for p in group["params"]):
                found[f"param {index} of optimizer {number}"] = p.detach()
                found[f"gradient of param {index} of optimizer {number}"] = p.grad
        for number, scaler in enumerate(amp._amp_state.loss_scalers):
            found[f"scaler {number}"] = scaler.loss_scale(), scaler._unskipped
        for number, model in enumerate(self.models):
            found |= {f"buffer {name} of model {number}": buffer for name, buffer in model.named_buffers()}
        for number in range(len(self.models)):
            found |= {f"saved {name} of model {number}": v for name, v in self.saved.get(f"model{number}", {}).items()}
        return {**found, "skipped": self.skipped}

    def take(self, step):
        self.saved, self.skipped = {}, None
        if step is not None:
            getattr(self, step["do"])(step)

    def block(self, step):
        chosen = [self.optimizers[n] for n in step["optimizers"]]
        block = amp.scale_loss(
            programs.loss_of(self.models, step),
            chosen if len(chosen) > 1 else chosen[0],
            loss_id=step["loss_id"],
            delay_unscale=step["delay_unscale"],
            delay_overflow_check=step["delay_overflow_check"],
        )
        with contextlib.suppress(Raised), block as scaled:
            if step["raises"] == "before":
                raise Raised
            if not step["late"]:
                self.take_inside(step["inside"])
            for _ in range(step["passes"] if scaled.requires_grad else 0):
                scaled.backward(retain_graph=True)
            if step["late"]:
                self.take_inside(step["inside"])
            if step["raises"] == "after":
                raise Raised

    def take_inside(self, steps):
        for inner in steps:
            if inner["fate"] == "refused":
                assert refuses(self, inner), f"inside of a block, {inner} is not refused"
            elif inner["fate"] == "taken":
                getattr(self, inner["do"])(inner)

    def nested(self, step):
        parts = step["outer"], step["inner"]
        sides = [[self.optimizers[n] for n in part["optimizers"]] for part in parts]
        losses = [programs.loss_of(self.models, part) for part in parts]
        outer, inner = (
            amp.scale_loss(loss, side, loss_id=part["loss_id"])
            for loss, side, part in zip(losses, sides, parts, strict=True)
        )
        with outer as first:
            if step["how"] == "outer first" and first.requires_grad:
                first.backward()
            with contextlib.suppress(RuntimeError), inner as second:
                self.backward_of(first, second, step["how"])

    def backward_of(self, first, second, how):
        given = {"together": [first + second], "apart": [first, second], "outer first": [second]}[how]
        for loss in given:
            if loss.requires_grad:
                loss.backward()

    def plain(self, step):
        loss = programs.loss_of(self.models, step)
        if loss.requires_grad:
            loss.backward()

    def step(self, step):
        self.optimizers[step["optimizer"]].step()
        if step["asks"]:
            self.skipped = amp.step_was_skipped(self.optimizers[step["optimizer"]])

    def clear(self, step):
        who, how = step["who"], step["how"]
        if who == "optimizer":
            self.optimizers[step["optimizer"]].zero_grad(set_to_none=how == "none")
        elif who == "model":
            self.models[step["model"]].zero_grad(set_to_none=how == "none")
        else:
            for weight in self.weights if who == "all" else [self.weights[step["weight"]]]:
                if how == "none":
                    weight.grad = None
                elif weight.grad is not None:
                    weight.grad.zero_()

    def edit(self, step):
        programs.edit([w.grad for w in self.weights if w.grad is not None], step["how"])

    def clip(self, step):
        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizers[step["optimizer"]]), step["norm"])

    def join(self, step):
        programs.join(self.config, self.optimizers, self.weights)
        for optimizer in self.optimizers:
            amp.master_params(optimizer)  # has masters follow

    def leave(self, step):
        optimizer = self.optimizers[step["optimizer"]]
        self.away.append((optimizer, programs.leave(optimizer)))
        amp.master_params(optimizer)  # has amp see it

    def come_back(self, step):
        optimizer, param = self.away.pop()
        optimizer.param_groups[0]["params"].append(param)
        amp.master_params(optimizer)

    def scale(self, step):
        amp._amp_state.loss_scalers[step["loss_id"]]._loss_scale = step["value"]

    def load_scaler(self, step):
        scaler = amp._amp_state.loss_scalers[step["loss_id"]]
        scaler.load_state_dict({**scaler.state_dict(), "scale": step["value"], "_growth_tracker": 0})

    def freeze(self, step):
        weight = self.weights[step["weight"]]
        weight.requires_grad_(not weight.requires_grad)

    @torch.no_grad()
    def write(self, step):
        how, weight = step["how"], self.weights[step["weight"]]
        before = weight.detach().clone()
        if how == "masters":
            for p in amp.master_params(self.optimizers[step["optimizer"]]):
                p.mul_(0.5)
        elif how == "data":
            programs.first(weight.data).fill_(step["value"])
        else:
            programs.first(weight).fill_(step["value"])
        self.look()
        if how == "and back":
            weight.copy_(before)
        for optimizer in self.optimizers:
            amp.master_params(optimizer)  # has masters follow

    def lay_out(self, step):
        weight = self.weights[step["weight"] % len(self.weights)]
        weight.data = programs.laid_out_anew(weight.data)
        self.look()

    def graft(self, step):
        programs.graft(self.models, step)
        self.look()

    def look(self):
        """Run forwards, which see what was written, and leave no trace."""
        for model in self.models:
            model.eval()
            model(torch.zeros(programs.BATCH, programs.FEATURES, dtype=torch.float32))
            model.train()

    def save(self, step):
        """Go on from a checkpoint, with everything made anew."""
        saved = self.state_dict()
        joined, frozen = step["joined"], [w.requires_grad for w in self.weights]
        self.make(seed=1)
        for weight, needs in zip(self.weights, frozen, strict=True):
            weight.requires_grad_(needs)
        if joined:
            self.join(step)
        self.load(saved, step["order"])
        self.saved = saved

    def snapshot(self, step):
        self.kept = self.saved = self.state_dict()

    def rewind(self, step):
        self.load(copy.deepcopy(self.kept), list(self.kept))  # torch's optimizers go on with the tensors themselves

    def state_dict(self):
        saved = {f"model{n}": model.state_dict() for n, model in enumerate(self.models)}
        saved |= {f"optimizer{n}": one.state_dict() for n, one in enumerate(self.optimizers)}
        file = io.BytesIO()
        torch.save({**saved, "amp": amp.state_dict()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, saved, order):
        for name in order:
            if name == "amp":
                amp.load_state_dict(saved[name])
            else:
                owners = self.models if name.startswith("model") else self.optimizers
                owners[int(name[-1])].load_state_dict(saved[name])


REFUSED = ("inside a scale_loss block of the same", "inside its scale_loss", "of another optimizer")


def refuses(real, step):
    """Whether ``step`` is refused for scaled gradients that others would use or add to."""
    try:
        getattr(real, step["do"])(step)
    except RuntimeError as error:
        return any(words in str(error) for words in REFUSED)
    return False


def run(program):
    """Run the reference, alone with torch; then amp, and compare what is seen after every step."""
    reset()
    reference = Reference(program["config"])
    fates = []
    expected = [reference.seen()]
    for each in program["steps"]:
        fates.append(reference.take(each))
        expected.append(reference.seen())
    real = Real(program["config"])
    check(0, real.seen(), expected[0])
    for index, each in enumerate(program["steps"]):
        is_possible = fates[index] == "taken"
        real.take(each if is_possible else None)
        check(index + 1, real.seen(), expected[index + 1])


@pytest.mark.rotate(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program(seed):
    assert_runs(run, programs.generate(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.rotate(20)
@pytest.mark.parametrize("seed", SEEDS[::10])
def test_a_program_under_another_default_dtype(seed, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        run(programs.generate(seed))
    finally:
        torch.set_default_dtype(before)


# -- fixed programs ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("steps", STALE.values(), ids=STALE)
def test_no_gradient_is_used_twice_or_after_it_was_cleared(level, steps):
    run({"config": {**CONFIG, "level": level}, "steps": steps})


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize(("config", "steps"), TOGETHER.values(), ids=TOGETHER)
def test_optimizers_that_share_weights(config, steps, level, loss_scale):
    run({"config": {**config, "level": level, "loss_scale": loss_scale}, "steps": steps})


def test_nothing_is_scaled_for_a_weight_that_joins():
    """At a scale of one the gradient of a batch norm is kept, though a block was delayed."""
    config = {**CONFIG, "level": "O5", "models": [["linear", "batchnorm"], ["linear"]], "sharers": [()] * 8}
    config |= {"loss_scale": 1.0, "owners": [0, 0, 0, None, 0, 1, 1, 1], "late": [None] * 3 + [0] + [None] * 4}
    run({"config": config, "steps": [block(0, delay_unscale=True), block(0), JOIN, step(0)]})


OVERTAKEN = {
    "put off again": [
        block(0, size=float("inf"), delay_overflow_check=True),
        step(0),
        clear("optimizer", "none"),
        block(0, delay_overflow_check=True),
        step(0),
    ],
    "scaled, taken as plain: delayed": [block(1, delay_unscale=True), step(0)],
    "scaled, taken as plain: raised": [block(1, raises="after"), step(0)],
}


@pytest.mark.parametrize("steps", OVERTAKEN.values(), ids=OVERTAKEN)
def test_overflows_reach_the_step_they_belong_to(steps):
    run({"config": {**CONFIG, "level": "O2"}, "steps": steps})


CLEARED_IN_THE_MODEL = {
    "the last block gave none": [[block(0, paths=[[0]]), block(0, paths=[[1]])], []],
    "the last block was empty": [[block(0), block(0, passes=0)], []],
    "the last block raised": [[block(0), block(0, raises="after")], []],
    "before clipping": [[block(0)], [{"do": "clip", "optimizer": 0, "norm": 2.0**-6}]],
    "before zero_grad": [[block(0)], [clear("optimizer", "zeros")]],
}


@pytest.mark.parametrize("how", ["none", "zeros"])
@pytest.mark.parametrize(("before", "after"), CLEARED_IN_THE_MODEL.values(), ids=CLEARED_IN_THE_MODEL)
def test_a_clearing_in_the_model_reaches_the_masters(before, after, how):
    for who in ("model", "one"):
        run({"config": {**CONFIG, "level": "O2"}, "steps": [*before, clear(who, how), *after, step(0)]})


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4", "O5"])
@pytest.mark.parametrize("raises", ["before", "after"])
def test_a_block_that_raises_at_a_scale_of_one(level, raises):
    """With masters, gradients are as before it; without, as in plain torch."""
    steps = [block(0), block(0, raises=raises), block(0), step(0), block(0, raises=raises), step(0)]
    run({"config": {**CONFIG, "level": level, "loss_scale": 1.0}, "steps": steps})


def test_scaled_gradients_of_a_weight_that_joins():
    config = {**CONFIG, "level": "O2", "owners": [0, 0, 0, 0, None, 0], "late": [None, None, None, None, 0, None]}
    steps = [block(0), step(0), clear("optimizer", "none"), {"do": "join", "optimizer": 0}, step(0)]
    run({"config": {**config, "optimizers": ["sgd"]}, "steps": steps})


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_accumulated_then_delayed(level):
    config = {**CONFIG, "level": level, "loss_scale": 128.0}
    run({"config": config, "steps": [block(0), block(0, delay_unscale=True), step(0)]})


# Weights: 1 is tied, of the first two layers; 5 that of the other model's layer.
CHANGING = {
    **CONFIG,
    "models": [["linear", "mirror"], ["linear"]],
    "owners": [0, 0, 0, 0, 1, 1, 1],
    "sharers": [()] * 7,
    "late": [None] * 7,
    "optimizers": ["fused", "momentum"],
}


def change(kind, weight, **more):
    return {"do": kind, "optimizer": 0, "weight": weight, "data": 3, **more}


TRAINED = [block(0, 1), step(0), step(1), clear("all", "none")]
CHANGED = {
    "laid out": [change("lay_out", 1), change("lay_out", 5)],
    "laid out and back": [change("lay_out", 1), *TRAINED, change("lay_out", 1)],
    "a layer of both models": [change("graft", 0, **{"model": 0, "from": 1, "layer": 1})],
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("before", [[], TRAINED, [*TRAINED, block(0, 1)]], ids=["at once", "trained", "in a pass"])
def test_models_that_change_between_steps(before, changes, level):
    run({"config": {**CHANGING, "level": level}, "steps": [*before, *changes, *TRAINED, *TRAINED]})
