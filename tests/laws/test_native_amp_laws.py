"""Training programs under ``native_amp.py``, the file that ``migrate --to native`` copies, against the slow reference.

Weights are float32 at every level there: the reference runs at O0, O1 and O4. The arithmetic is the same, to the bit.
"""

import contextlib
import copy
import io

import programs
import pytest
import torch
from comparing import assert_runs, check
from fixed_programs import CONFIG, STALE, TOGETHER, block, clear, step
from law_profiles import SEEDS
from native_file import native_amp
from reference_amp import Raised, Reference

LEVELS = {"O0": "O0", "O1": "O1", "O2": "O1", "O3": "O1", "O4": "O4", "O5": "O4"}
#: Steps about master weights, and about what a script cannot ask of the file.
LEFT_OUT = (*programs.CHANGES, "leave", "come_back", "write", "load_scaler", "save")


class Native:
    """A run of a program, by torch under ``native_amp.py``."""

    def __init__(self, program):
        self.config = program["config"]
        self.make(seed=0)

    def make(self, seed):
        config = self.config
        self.amp = native_amp()
        self.models, self.weights = programs.build(config, seed)
        self.optimizers = programs.make_optimizers(config, self.weights)
        self.amp.initialize(
            self.models,
            self.optimizers,
            opt_level=config["level"],
            loss_scale=config["loss_scale"],
            min_loss_scale=config["minimum"],
            max_loss_scale=config["maximum"],
            num_losses=config["losses"],
            verbosity=0,
        )
        for scaler in self.amp._amp_state.loss_scalers:
            scaler._scale_seq_len = config["window"]

    def seen(self):
        found = {f"weight {n}": w.detach() for n, w in enumerate(self.weights)}
        found |= {f"p.grad of weight {n}": w.grad for n, w in enumerate(self.weights)}
        for number, one in enumerate(self.optimizers):
            for index, p in enumerate(p for group in one.param_groups for p in group["params"]):
                found[f"param {index} of optimizer {number}"] = p.detach()
                found[f"gradient of param {index} of optimizer {number}"] = p.grad
        for number, scaler in enumerate(self.amp._amp_state.loss_scalers):
            found[f"scaler {number}"] = scaler.loss_scale(), scaler._unskipped
        for number, model in enumerate(self.models):
            found |= {f"buffer {name} of model {number}": buffer for name, buffer in model.named_buffers()}
        return found

    def take(self, step):
        getattr(self, step["do"])(step)

    def open_block(self, part, chosen, **more):
        loss = programs.loss_of(self.models, part)
        chosen = [self.optimizers[n] for n in chosen]
        given = {name: value for name, value in more.items() if value}
        return self.amp.scale_loss(loss, chosen if len(chosen) > 1 else chosen[0], part["loss_id"], **given)

    def block(self, step):
        delays = {name: step[name] for name in ("delay_unscale", "delay_overflow_check")}
        opened = self.open_block(step, step["optimizers"], **delays)
        with contextlib.suppress(Raised), opened as scaled:
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
                self.take(inner)

    def plain(self, step):
        loss = programs.loss_of(self.models, step)
        if loss.requires_grad:
            loss.backward()

    def step(self, step):
        self.optimizers[step["optimizer"]].step()

    def clear(self, step):
        set_to_none = step["how"] == "none"
        if step["who"] == "optimizer":
            self.optimizers[step["optimizer"]].zero_grad(set_to_none)
        elif step["who"] == "model":
            self.models[step["model"]].zero_grad(set_to_none)
        else:
            for weight in self.weights if step["who"] == "all" else [self.weights[step["weight"]]]:
                if set_to_none:
                    weight.grad = None
                elif weight.grad is not None:
                    weight.grad.zero_()

    def edit(self, step):
        programs.edit([w.grad for w in self.weights if w.grad is not None], step["how"])

    def clip(self, step):
        torch.nn.utils.clip_grad_norm_(self.amp.master_params(self.optimizers[step["optimizer"]]), step["norm"])

    def join(self, step):
        programs.join(self.config, self.optimizers, self.weights)

    def scale(self, step):
        self.amp._amp_state.loss_scalers[step["loss_id"]]._loss_scale = step["value"]

    def freeze(self, step):
        weight = self.weights[step["weight"]]
        weight.requires_grad_(not weight.requires_grad)

    def snapshot(self, step):
        file = io.BytesIO()
        state = {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [one.state_dict() for one in self.optimizers],
            "amp": self.amp.state_dict(),
        }
        torch.save(state, file)
        file.seek(0)
        self.kept = torch.load(file, weights_only=True)

    def rewind(self, step):
        kept = copy.deepcopy(self.kept)
        for one, state in zip(self.models + self.optimizers, kept["models"] + kept["optimizers"], strict=True):
            one.load_state_dict(state)
        self.amp.load_state_dict(kept["amp"])


def refuses(native, step):
    try:
        native.take(step)
    except RuntimeError as error:
        return "scaled" in str(error)
    return False


def run(program):
    """Run the reference, then the file, and compare what is seen after every step; return how many were taken.

    A program ends before a parameter that joins an optimizer with a gradient, which amp drops, and where weights are
    not finite any more.
    """
    config = program["config"]
    reference = Reference(config)
    expected = [reference.seen()]
    taken = []
    for one in program["steps"]:
        has_gradients = any(grad is not None for grad in gradients(expected[-1]).values())
        if one["do"] == "join" and has_gradients:
            break
        fate = reference.take(one)
        is_broken = is_dynamic(config) and not are_finite(reference.seen(), "weight")
        if is_broken:
            break
        expected.append(reference.seen())
        taken.append(one if fate == "taken" else None)
    native = Native(program)
    for index, (one, values) in enumerate(zip([None, *taken], expected, strict=True)):
        if one is not None:
            native.take(one)
        check(index, native.seen(), {name: value for name, value in values.items() if is_compared(name)})
    return len(taken)


def is_dynamic(config):
    return config["loss_scale"] == "dynamic" or (config["loss_scale"] is None and config["level"] == "O1")


def gradients(seen):
    return {name: value for name, value in seen.items() if name.startswith("p.grad")}


def are_finite(seen, beginning=""):
    tensors = [value for name, value in seen.items() if name.startswith(beginning) and torch.is_tensor(value)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def is_compared(name):
    """Names that only amp has are not."""
    return name != "skipped" and not name.startswith("saved")


def generate(seed):
    program = programs.generate(seed)
    plain = {"bfloat16": False, "masters": None, "batchnorm": None}
    program["config"] |= {**plain, "level": LEVELS[program["config"]["level"]]}
    program["steps"] = [one for one in program["steps"] if one["do"] not in (*LEFT_OUT, "nested")]
    for one in program["steps"]:
        # In a block a script clears by zero_grad, and neither clips nor raises.
        one["inside"] = [inner for inner in one.get("inside", ()) if inner["do"] != "clip"]
        for inner in one["inside"]:
            inner |= {"delay_unscale": False, "delay_overflow_check": False, "raises": None, "inside": []}
            if inner["do"] == "clear":
                inner |= {"who": "model" if inner["who"] == "model" else "optimizer", "how": "none"}
    return program


@pytest.mark.filterwarnings("ignore:.*forward never ran:UserWarning")
@pytest.mark.rotate(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program(seed):
    assert_runs(run, generate(seed))


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("steps", STALE.values(), ids=STALE)
def test_no_gradient_is_used_after_it_was_cleared(level, steps):
    config = {**CONFIG, "level": level}
    assert run({"config": config, "steps": steps}) == len(steps)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize(("config", "steps"), TOGETHER.values(), ids=TOGETHER)
def test_optimizers_that_share_weights(config, steps, loss_scale):
    run({"config": {**config, "level": "O1", "loss_scale": loss_scale}, "steps": steps})


OVERFLOW = {"size": float("inf")}
SEVERAL = {
    "an overflow in the first of two losses": [
        block(0, **OVERFLOW),
        block(0),
        step(0),
        clear("all", "none"),
        block(0),
        step(0),
    ],
    "in the last": [block(0), block(0, **OVERFLOW), step(0), clear("all", "none"), block(0), step(0)],
    "accumulated": [block(0), block(0), block(0), step(0)],
    "delayed": [block(0, delay_unscale=True), block(0), step(0)],
    "an overflow in a delayed one": [block(0, delay_unscale=True, **OVERFLOW), block(0), step(0)],
    "delayed to the step": [block(0, delay_unscale=True), step(0)],
    "delayed twice, and overflowed": [
        *[block(0, delay_unscale=True, **OVERFLOW) for _ in range(2)],
        clear("all", "none"),
        step(0),
        block(0),
        step(0),
    ],
    "cleared after an overflow": [block(0, **OVERFLOW), clear("optimizer", "none"), block(0), step(0), step(0)],
    "raised": [block(0, raises="after"), block(0), step(0)],
    "raised after an overflow": [
        block(0, raises="after", **OVERFLOW),
        step(0),
        clear("all", "none"),
        block(0),
        step(0),
    ],
    "one loss, two optimizers": [block(0, 1, **OVERFLOW), step(0), clear("all", "none"), block(0), step(0)],
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("steps", SEVERAL.values(), ids=SEVERAL)
def test_several_blocks_before_a_step(steps, level, loss_scale):
    config = {**CONFIG, "level": level, "loss_scale": loss_scale}
    assert run({"config": config, "steps": steps}) == len(steps)
