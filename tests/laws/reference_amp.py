"""What amp owes, written from the tables of DESIGN: plain torch, one weight at a time, and nothing of ampcompat in it.

The models are torch's own, cast by hand; gradients come from torch's autograd. Scaling, unscaling, overflows, masters,
and whose gradients are whose are done here, step by step. The arithmetic is that of amp: results agree to the bit.
"""

import copy
from dataclasses import dataclass, field

import programs
import torch

HALF = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
FLOOR = 2.0**-24
# Before torch 2.7 the cache of weights keeps what a no_grad forward has cast: it is unused there.
CACHES_WEIGHTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


@dataclass(eq=False)
class Scaler:
    """One loss scale: x2 after ``window`` clean passes, /2 on overflow, clamped where it moves."""

    dynamic: bool
    scale: float
    minimum: float | None
    maximum: float
    window: int
    unskipped: int = 0
    pending: bool = False  # a pass that has left its transition to the next block has overflowed

    @classmethod
    def make(cls, loss_scale, minimum, maximum, window):
        if loss_scale == "dynamic":
            return cls(True, min(maximum, 2.0**16), minimum, maximum, window)
        return cls(False, float(loss_scale), minimum, maximum, window)

    def update(self, overflow):
        overflow, self.pending = overflow or self.pending, False
        if not self.dynamic:
            self.unskipped += 1
        elif overflow:
            smaller = self.scale / 2
            floor = FLOOR if self.minimum is None else self.minimum
            self.scale = max(floor, smaller) if smaller < self.scale else smaller
            self.unskipped = 0
        else:
            self.unskipped += 1
            if self.unskipped == self.window:
                self.scale, self.unskipped = min(self.maximum, self.scale * 2), 0


@dataclass(eq=False)
class Weight:
    """A weight of the model (``leaf``), and the one that the optimizer steps (``value``): a master, or the same."""

    leaf: torch.nn.Parameter
    value: torch.nn.Parameter
    shown: tuple[torch.Tensor, int] | None = None  # the model's gradient that tells of the master's, and its version
    is_saved: bool = False  # a state dict has it: from then on it has its master, though no optimizer may hold it

    @property
    def has_master(self):
        return self.value is not self.leaf

    def push(self):
        self.leaf.data.copy_(self.value)

    def accumulate(self, unscaled):
        """Add to the master's gradient, which is laid out as the master is: fused optimizers go through raw memory."""
        before = self.value.grad
        total = unscaled if before is None else before + unscaled
        self.value.grad = torch.empty_like(self.value).copy_(total).detach()

    def forget(self):
        """There is no gradient of the master any more."""
        self.value.grad, self.shown = None, None

    def note(self):
        """The model's gradient shows what the master's is, and may be cleared."""
        self.shown = None if self.value.grad is None else (self.leaf.grad, self.leaf.grad._version)

    def show(self):
        """The model shows the sum again that a block had hidden."""
        if self.has_master and self.leaf.grad is None and self.value.grad is not None:
            self.leaf.grad = self.value.grad.to(self.leaf.dtype)
            self.note()

    def scale_older(self, scale):
        """The model has the gradient of a delayed block, multiplied by the scale of a block that adds to it."""
        older = self.value.grad
        self.value.grad, self.shown = None, None
        self.leaf.grad = None if older is None else (older * scale).to(self.leaf.dtype)

    def zero(self):
        """``zero_grad(set_to_none=False)``: where the model has a gradient, both are zero."""
        if self.leaf.grad is None:
            self.shown = None
            return
        self.leaf.grad.zero_()
        if self.value.grad is None:
            self.value.grad = torch.zeros_like(self.value)
        else:
            self.value.grad.zero_()
        self.note()

    def pull(self):
        """Take the elements that somebody wrote into the model."""
        kept = self.value.to(self.leaf.dtype) == self.leaf
        self.value.data.copy_(torch.where(kept, self.value, self.leaf.to(self.value.dtype)))


@dataclass(eq=False)
class Block:
    """An open block: its weights each once, the unscaled gradients from before, and the scaler of its loss."""

    chosen: list["Optimizer"]
    weights: list[Weight]
    scale: float
    scaler: Scaler
    saved: dict[Weight, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Optimizer:
    """A torch optimizer, and what is known of the gradients of what it holds."""

    torch: torch.optim.Optimizer
    weights: list[Weight]
    shared: set[Weight] = field(default_factory=set)  # another one holds these too
    overflow: bool = False  # a block since the last step, at a dynamic scale
    skipped: bool = False
    joins_next: bool = False  # the next block adds to its gradients in the model (``delay_unscale``)

    def gradients(self):
        return [weight.value.grad for weight in self.weights if weight.value.grad is not None]

    def zero_grad(self, set_to_none=True):
        self.torch.zero_grad(set_to_none)
        self.joins_next = False
        for weight in self.weights:
            if weight.has_master and set_to_none:
                weight.leaf.grad = None
                weight.forget()
            elif weight.has_master:
                weight.zero()

    def step(self):
        self.skipped = self.overflow
        self.overflow = self.joins_next = False
        if not self.skipped:
            self.torch.step()
        for weight in self.weights:
            weight.push()
        for weight in self.weights:  # those that others step too keep their gradients until they are cleared
            if weight.has_master and weight not in self.shared:
                weight.forget()


def clone(tensor):
    return None if tensor is None else tensor.clone()


class Raised(Exception):
    """What the programs raise inside blocks."""


class Refused(Exception):
    """What amp must refuse inside of a block, with a RuntimeError and without a change."""


class Reference:
    """A run of a program."""

    def __init__(self, config):
        self.config = config
        level = config["level"]
        self.half = torch.bfloat16 if config["bfloat16"] else HALF.get(level)
        self.casts = level in ("O2", "O3", "O5")
        masters = config["masters"] if config["masters"] is not None else level in ("O2", "O5")
        keeps = config["batchnorm"] if config["batchnorm"] is not None else level in ("O2", "O5")
        self.models, leaves = programs.build(config, 0)
        exact = [p.detach().clone() for p in leaves]
        if self.casts:
            for module in [m for model in self.models for m in model.modules()]:
                if not (keeps and isinstance(module, torch.nn.BatchNorm1d)):
                    for tensor in (*module._parameters.values(), *module._buffers.values()):
                        if tensor is not None and tensor.dtype == torch.float32:
                            tensor.data = tensor.data.to(self.half)
        self.weights = []
        for leaf, full, owner in zip(leaves, exact, config["owners"], strict=True):
            value = leaf
            if masters and leaf.dtype != torch.float32:  # that of a weight that nobody trains yet is made of the half
                value = torch.nn.Parameter(full if owner is not None else leaf.detach().float())
            self.weights.append(Weight(leaf, value))
        made = programs.make_optimizers(config, [w.value for w in self.weights])
        self.optimizers = [Optimizer(one, []) for one in made]
        self.dead = []  # weights that optimizers hold and no model does, where others are seen in their stead
        self.changes = 0  # of models, and of what optimizers hold: a run that is made anew has none
        self.away = []  # weights that an optimizer has let go, and which
        self.open = []
        self.has_scaled = False
        self.list_weights()
        dynamic = level in ("O1", "O2") and self.half is torch.float16
        loss_scale = config["loss_scale"] or ("dynamic" if dynamic else 1.0)
        self.scalers = [
            Scaler.make(loss_scale, config["minimum"], config["maximum"], config["window"])
            for _ in range(config["losses"])
        ]
        # As in apex: where nothing is scaled and there are no masters, a block does nothing and counts nothing.
        self.idle = loss_scale == 1.0 and not (masters and self.casts)
        self.joined = False
        self.kept, self.saved, self.skipped = None, {}, None

    def list_weights(self):
        """Look at what the optimizers hold; return the weights that none had held."""
        by_value = {id(w.value): w for w in (*self.weights, *self.dead)}
        known = {weight for one in self.optimizers for weight in one.weights}
        new = []
        for one in self.optimizers:
            one.weights = [by_value[id(p)] for group in one.torch.param_groups for p in group["params"]]
            new += [weight for weight in one.weights if weight not in known]
        for one in self.optimizers:
            held_by_others = {weight for other in self.optimizers if other is not one for weight in other.weights}
            one.shared = held_by_others.intersection(one.weights)
        return new

    def forward(self, number):
        model = self.models[number]

        def call(x):
            if self.casts:
                return model(x.to(self.half)).float()
            if self.half is None:
                return model(x)
            with torch.autocast(torch.get_default_device().type, self.half, cache_enabled=CACHES_WEIGHTS):
                return model(x)

        return call

    def loss(self, step):
        return programs.loss_of([self.forward(n) for n in range(len(self.models))], step)

    def seen(self):
        """What a script may look at, by name."""
        # The half of a master that no model holds any more is written whenever somebody looks at it.
        placed = {id(p) for model in self.models for p in model.parameters()}
        looked_at = [(n, w) for n, w in enumerate(self.weights) if id(w.leaf) in placed or not w.has_master]
        found = {f"weight {n}": w.leaf.detach().clone() for n, w in looked_at}
        found |= {f"p.grad of weight {n}": clone(w.leaf.grad) for n, w in enumerate(self.weights)}
        for number, one in enumerate(self.optimizers):
            for index, weight in enumerate(one.weights):
                found[f"param {index} of optimizer {number}"] = weight.value.detach().clone()
                found[f"gradient of param {index} of optimizer {number}"] = clone(weight.value.grad)
        for number, scaler in enumerate(self.scalers):
            found[f"scaler {number}"] = scaler.scale, scaler.unskipped
        for number, model in enumerate(self.models):
            found |= {f"buffer {name} of model {number}": b.clone() for name, b in model.named_buffers()}
        return {**found, **self.saved, "skipped": self.skipped}

    def take(self, step):
        """Take one step of a program; return "taken", or "impossible" where a script could not take it now."""
        self.saved, self.skipped = {}, None
        possible = getattr(self, step["do"])(step) is not False
        return "taken" if possible else "impossible"

    # -- changes of the models themselves ------------------------------------------------------------------------------
    def places(self, weight):
        return programs.places(self.models, weight.leaf)

    def owner(self, weight):
        return next((one for one in self.optimizers if weight in one.weights), None)

    def lay_out(self, step):
        weight = self.weights[step["weight"] % len(self.weights)]
        if not weight.has_master or weight.leaf.dim() < 2 or not self.places(weight):
            return False  # without a master, torch's fused optimizers mix elements up
        weight.leaf.data = programs.laid_out_anew(weight.leaf.data)
        if self.owner(weight) is None and not weight.is_saved:  # its master is made later, of this one
            weight.value.data = programs.laid_out_anew(weight.value.data)
        return True

    def graft(self, step):
        changed = programs.graft(self.models, step)
        self.changes += changed
        return changed

    # -- steps of programs ---------------------------------------------------------------------------------------------
    def join(self, step):
        late = [(w, owner) for w, owner in zip(self.weights, self.config["late"], strict=False) if owner is not None]
        if self.joined or any(self.changes and self.owner(w) or w in self.optimizers[n].weights for w, n in late):
            return False
        programs.join(self.config, [one.torch for one in self.optimizers], [w.value for w in self.weights])
        self.joined = True
        self.welcome()
        self.look(self.optimizers)
        return True

    def welcome(self):
        """What comes to an optimizer, and none held, may have been left scaled gradients."""
        new = self.list_weights()
        if self.has_scaled:
            for weight in new:
                weight.leaf.grad = None
                if weight.has_master:
                    weight.forget()

    def leave(self, step):
        one = self.optimizers[step["optimizer"]]
        if len(one.weights) < 2:
            return False
        weight = one.weights[-1]
        programs.leave(one.torch)
        weight.is_saved = True  # its master stays
        self.away.append((step["optimizer"], weight))
        self.changes += 1
        self.welcome()
        self.look([one])
        return True

    def come_back(self, step):
        if not self.away or self.away[-1][1] in self.optimizers[self.away[-1][0]].weights:
            return False
        number, weight = self.away.pop()
        self.optimizers[number].torch.param_groups[0]["params"].append(weight.value)
        self.changes += 1
        self.welcome()
        self.look([self.optimizers[number]])
        return True

    def plain(self, step):
        """Run a backward pass outside any block, where its gradients cannot be mistaken for a block's."""
        if any(w.leaf.grad is not None or w.value.grad is not None for w in self.weights):
            return False
        loss = self.loss(step)
        if loss.requires_grad:
            loss.backward()
        return True

    def block(self, step):
        chosen, scaler = [self.optimizers[n] for n in step["optimizers"]], self.scalers[step["loss_id"]]
        loss = self.loss(step)
        if self.idle:
            self.backward(loss, step)
            return
        block = self.begin(chosen, scaler)
        self.open.append(block)
        self.backward(loss.float() * block.scale, step)
        self.open.remove(block)
        waits = step["raises"] or step["delay_overflow_check"] or step["delay_unscale"]
        self.end(block, counts=not waits, joins_next=step["delay_unscale"])

    def nested(self, step):
        """A block in a block."""
        outer, inner = step["outer"], step["inner"]
        sides = [[self.optimizers[n] for n in part["optimizers"]] for part in (outer, inner)]
        scalers = [self.scalers[part["loss_id"]] for part in (outer, inner)]
        losses = [self.loss(part) for part in (outer, inner)]
        if self.idle:
            self.backward_of(losses, step["how"])
            return
        scales = [scaler.scale for scaler in scalers]
        losses = [loss.float() * scale for loss, scale in zip(losses, scales, strict=True)]
        first = self.begin(sides[0], scalers[0])
        if step["how"] == "outer first":
            self.backward_of(losses[:1])
            losses = losses[1:]
        self.open = [first]
        try:
            second = self.begin(sides[1], scalers[1])
        except Refused:
            self.end(first)
            return
        finally:
            self.open = []
        self.backward_of(losses, step["how"])
        for block in (second, first):
            self.end(block)

    def backward(self, loss, step):
        if step["raises"] == "before":
            return
        if not step["late"]:
            self.take_inside(step["inside"])
        for _ in range(step["passes"] if loss.requires_grad else 0):
            loss.backward(retain_graph=True)
        if step["late"]:
            self.take_inside(step["inside"])

    def take_inside(self, steps):
        """Take ``steps`` in an open block, and note the fate of each."""
        for step in steps:
            try:
                step["fate"] = "impossible" if getattr(self, step["do"])(step) is False else "taken"
            except Refused:
                step["fate"] = "refused"

    def refuse_open(self, weights):
        """Refuse a block or a step of a weight that an open block has."""
        if any(weight in block.weights for block in self.open for weight in weights):
            raise Refused

    def backward_of(self, losses, how="apart"):
        for loss in [sum(losses)] if how == "together" else losses:
            if loss.requires_grad:
                loss.backward()

    def begin(self, chosen, scaler):
        weights = list(dict.fromkeys(weight for one in chosen for weight in one.weights))
        self.refuse_open(weights)
        self.has_scaled = self.has_scaled or scaler.dynamic or scaler.scale != 1.0
        block = Block(chosen, weights, scaler.scale, scaler)
        for one in chosen:
            self.drop_cleared(one.weights)
        if any(one.joins_next for one in chosen):
            for weight in weights:
                weight.scale_older(block.scale)
            return block
        for one in chosen:
            for weight in one.weights:
                if not weight.has_master and weight.leaf.grad is not None:
                    block.saved[weight] = weight.leaf.grad
                weight.leaf.grad, weight.shown = None, None
        return block

    def drop_cleared(self, weights):
        """Masters lose the gradients that the model showed, and that a script has cleared there."""
        for weight in weights:
            if weight.shown is not None and weight.leaf.grad is None:
                weight.forget()

    def end(self, block, counts=True, joins_next=False):
        overflow = self.unscale(block, counts)
        for one in self.optimizers:
            if set(one.weights) & set(block.weights):
                one.overflow |= overflow
                one.joins_next = joins_next

    def unscale(self, scaled, counts):
        """Unscale, add up, and move the scale, or leave that to its next block; whether a step must be skipped."""
        overflow = False
        inverse = torch.tensor(1 / scaled.scale, dtype=torch.float32)
        for weight in scaled.weights:
            new, old = weight.leaf.grad, scaled.saved.get(weight)
            if new is None:
                weight.leaf.grad = old
                weight.show()
                continue
            overflow |= not bool(new.isfinite().all())
            unscaled = new.float() * inverse
            if weight.has_master:
                weight.accumulate(unscaled)
                weight.note()
            else:
                unscaled = unscaled.to(new.dtype)
                weight.leaf.grad = unscaled if old is None else unscaled + old
        scaler = scaled.scaler
        if counts:
            scaler.update(overflow)
        else:
            scaler.pending |= overflow
        return overflow and scaler.dynamic

    def step(self, step):
        one = self.optimizers[step["optimizer"]]
        self.refuse_open(one.weights)
        self.drop_cleared(one.weights)
        one.step()
        if step["asks"]:
            self.skipped = one.skipped

    def clear_set_aside(self, weights):
        """Clear what open blocks have set aside of ``weights``."""
        cleared = set(weights)
        for each in self.open:
            each.saved = {weight: grad for weight, grad in each.saved.items() if weight not in cleared}

    def clear(self, step):
        who, how = step["who"], step["how"]
        if who == "optimizer":
            one = self.optimizers[step["optimizer"]]
            self.drop_cleared(one.weights)
            one.zero_grad(how == "none")
            self.clear_set_aside(one.weights)
            return
        for weight in self.cleared_by(step):
            if how == "none":
                weight.leaf.grad = None
                if who == "model" and weight.has_master:
                    weight.forget()
            elif who == "model" and weight.has_master and (self.owner(weight) or weight.is_saved):
                weight.zero() if weight.leaf.grad is not None else weight.forget()
            elif weight.leaf.grad is not None:  # by hand: masters do not hear of it
                weight.leaf.grad.zero_()
        if who == "model":
            self.clear_set_aside(self.cleared_by(step))

    def edit(self, step):
        """Edit the gradients of the model; the gradients of masters stay as they are."""
        programs.edit([w.leaf.grad for w in self.weights if w.leaf.grad is not None], step["how"])

    def cleared_by(self, step):
        if step["who"] == "model":
            members = {id(p) for p in self.models[step["model"]].parameters()}
            return [w for w in self.weights if id(w.leaf) in members]
        return self.weights if step["who"] == "all" else [self.weights[step["weight"]]]

    def look(self, chosen):
        """Outside of blocks, a script that asks for masters finds their gradients unscaled."""
        for one in chosen:
            self.drop_cleared(one.weights)

    def clip(self, step):
        self.look([self.optimizers[step["optimizer"]]])
        torch.nn.utils.clip_grad_norm_([w.value for w in self.optimizers[step["optimizer"]].weights], step["norm"])

    def scale(self, step):
        scaler = self.scalers[step["loss_id"]]
        if scaler.dynamic:
            scaler.scale = step["value"]
        return scaler.dynamic

    def load_scaler(self, step):
        scaler = self.scalers[step["loss_id"]]
        if scaler.dynamic:
            scaler.scale, scaler.unskipped = step["value"], 0
        return scaler.dynamic

    def freeze(self, step):
        leaf = self.weights[step["weight"]].leaf
        leaf.requires_grad_(not leaf.requires_grad)

    @torch.no_grad()
    def write(self, step):
        weight = self.weights[step["weight"]]
        if step["how"] == "masters":
            for weight in self.optimizers[step["optimizer"]].weights:
                weight.value.mul_(0.5)
                if self.places(weight):  # else the step pushes it
                    weight.push()
            self.look(self.optimizers)
            return True
        if not self.places(weight):
            return False
        self.look(self.optimizers)
        if step["how"] != "and back":
            programs.first(weight.leaf).fill_(step["value"])
            weight.pull()
        return True

    def save(self, step):
        """Forget what is not part of a checkpoint: gradients, and what is known of them."""
        if self.changes:
            return False
        self.save_models()
        step["joined"] = self.joined
        self.has_scaled = False
        for weight in self.weights:
            weight.leaf.grad = None
            weight.forget()
        for one in self.optimizers:
            one.zero_grad()
            one.overflow = False
        for scaler in self.scalers:
            scaler.pending = False
        for weight in self.weights:
            weight.leaf.data = weight.leaf.data.contiguous()
        return True

    def save_models(self):
        """State dicts are float32, and have the masters."""
        values = {id(w.leaf): w.value for w in self.weights}
        for weight in self.weights:
            weight.is_saved |= bool(self.places(weight))
        for number, model in enumerate(self.models):
            for name, tensor in model.state_dict(keep_vars=True).items():
                value = values.get(id(tensor), tensor).detach()
                value = value.float() if value.is_floating_point() else value.clone()
                self.saved[f"saved {name} of model {number}"] = value.clone()

    def snapshot(self, step):
        self.save_models()
        self.kept = (self.joined, self.changes), self.state_dicts()

    def rewind(self, step):
        if self.kept is None or self.kept[0] != (self.joined, self.changes):
            return False
        tensors, optimizers, scales = self.kept[1]
        for tensor, value in zip(self.tensors(), tensors, strict=True):
            tensor.data.copy_(value)
        for weight in self.weights:
            weight.push()
        for one, held in zip(self.optimizers, optimizers, strict=True):
            one.torch.load_state_dict(copy.deepcopy(held))
        for scaler, (scale, unskipped) in zip(self.scalers, scales, strict=True):
            scaler.scale, scaler.unskipped, scaler.pending = scale, unskipped, False
        return True

    def tensors(self):
        return [w.value for w in self.weights if self.places(w)] + [b for m in self.models for b in m.buffers()]

    def state_dicts(self):
        return (
            [t.detach().clone() for t in self.tensors()],
            copy.deepcopy([one.torch.state_dict() for one in self.optimizers]),
            [(s.scale, s.unskipped) for s in self.scalers],
        )
