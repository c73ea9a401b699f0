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
    put_off: bool = False
    puts_off: bool = False  # blocks that the next transition counts

    @classmethod
    def make(cls, loss_scale, minimum, maximum, window):
        if loss_scale == "dynamic":
            return cls(True, min(maximum, 2.0**16), minimum, maximum, window)
        return cls(False, float(loss_scale), minimum, maximum, window)

    def update(self, overflow):
        overflow, self.put_off, self.puts_off = overflow or self.put_off, False, False
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
    cleared: bool = False  # the master's gradient is gone, and amp has had no reason to look since

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

    def show(self, scale):
        """Have the model show what its master has accumulated, where the last block has given nothing."""
        if self.has_master and self.value.grad is not None:
            self.leaf.grad = (self.value.grad * scale).to(self.leaf.dtype)
            self.note()

    def pull(self):
        """Take the elements that somebody wrote into the model."""
        kept = self.value.to(self.leaf.dtype) == self.leaf
        self.value.data.copy_(torch.where(kept, self.value, self.leaf.to(self.value.dtype)))


@dataclass(eq=False)
class Pending:
    """Scaled gradients of one backward pass, left by blocks of ``scalers``."""

    scale: float
    scalers: list[Scaler]


@dataclass(eq=False)
class GradientSet:
    """The gradients of the weights that exactly the same optimizers hold (the columns of the table)."""

    weights: list[Weight] = field(default_factory=list)
    waits: bool = False  # UNSCALED, or PENDING
    pending: Pending | None = None
    saved: dict[Weight, torch.Tensor | None] = field(default_factory=dict)
    flags: bool = False  # blocks of dynamic scales have looked for an overflow
    overflow: bool = False
    old_overflow: bool = False  # gradients that are not finite may have stayed
    users: dict["Optimizer", bool] = field(default_factory=dict)  # whose blocks gave them, and whether each has stepped

    def part(self, weights, holders):
        """A set in the same state, of other weights."""
        made = copy.copy(self)
        made.weights = weights
        made.saved = {weight: grad for weight, grad in self.saved.items() if weight in weights}
        made.users = {one: stepped for one, stepped in self.users.items() if one in holders}
        return made

    def gradients(self, with_masters=True):
        found = [w.value.grad for w in self.weights if with_masters or not w.has_master]
        return [grad for grad in [*found, *self.saved.values()] if grad is not None]

    def forget(self):
        self.waits, self.flags, self.overflow, self.old_overflow, self.users = False, False, False, False, {}

    def forget_cleared(self):
        if not self.pending and not self.gradients():
            self.forget()

    def clear(self):
        self.saved, self.pending = {}, None
        self.forget()

    def save(self):
        for weight in self.weights:
            if not weight.has_master:
                self.saved[weight] = weight.leaf.grad
            weight.leaf.grad, weight.shown, weight.cleared = None, None, False

    def begin_anew(self, chosen):
        """What a user has stepped with makes place for new gradients."""
        if not any(self.users.get(one) for one in chosen):
            return
        for weight in self.weights:
            if weight.has_master:
                weight.forget()
        self.users = {one: False for one, stepped in self.users.items() if not stepped}
        self.old_overflow |= self.flags
        self.flags = self.overflow = False

    def end_step(self, one, skipped):
        """``one`` has stepped; ``skipped``: None where only the device knows."""
        self.users[one] = True
        if all(self.users.values()):
            self.use_up(skipped)

    def use_up(self, skipped):
        for weight in self.weights:
            if weight.has_master:
                weight.forget()
        self.old_overflow = (self.old_overflow or self.flags) if skipped is not False else False
        self.waits, self.flags, self.overflow, self.users = False, False, False, {}


@dataclass(eq=False)
class Optimizer:
    """A torch optimizer, and the sets of what it holds."""

    torch: torch.optim.Optimizer
    weights: list[Weight]
    sets: list[GradientSet] = field(default_factory=list)
    skipped: bool = False

    def zero_grad(self, set_to_none=True):
        self.torch.zero_grad(set_to_none)
        for weight in self.weights:
            if weight.has_master and set_to_none:
                weight.leaf.grad = None
                weight.forget()
            elif weight.has_master:
                weight.zero()
        for each in self.sets:
            each.clear()

    def step(self):
        for each in self.sets:
            each.forget_cleared()
        used = [each for each in self.sets if each.users.get(self)]
        flagged = [each for each in self.sets if each.overflow and each not in used]
        stayed = []
        for each in self.sets:
            if each.old_overflow or (each.flags and each in used):
                stayed += each.gradients(with_masters=each not in used)
        left = not all(bool(grad.isfinite().all()) for grad in stayed)
        self.skipped = bool(flagged) or left
        # Then whether it skipped is not known yet, where there was a flag.
        is_flagged = bool(stayed) or any(each.flags for each in self.sets if each not in used)
        decides_itself = bool(self.torch.defaults.get("fused")) and is_flagged
        if not self.skipped:
            hidden = [(w, w.value.grad) for each in used for w in each.weights if w.has_master]
            for weight, _ in hidden:
                weight.value.grad = None
            self.torch.step()
            for weight, grad in hidden:
                weight.value.grad = grad
        for weight in self.weights:
            weight.cleared = False
            weight.push()
        for each in self.sets:
            each.end_step(self, None if decides_itself else self.skipped)


def clone(tensor):
    return None if tensor is None else tensor.clone()


class Raised(Exception):
    """What the programs raise inside blocks."""


class Refused(Exception):
    """What amp must refuse, with a RuntimeError and without a change."""


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
        self.unscaled = set()  # those that no block has been opened since, and whose gradients were unscaled then
        self.sets = []
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
        self.open = []  # optimizers that a block is open of
        self.has_scaled = False
        self.kept, self.saved, self.skipped = None, {}, None

    def list_weights(self):
        by_value = {id(w.value): w for w in (*self.weights, *self.dead)}
        for one in self.optimizers:
            one.weights = [by_value[id(p)] for group in one.torch.param_groups for p in group["params"]]
        self.regroup()

    def regroup(self):
        """Sets of the weights that the same optimizers hold; what falls apart keeps its state."""
        old_of = {weight: old for old in self.sets for weight in old.weights}
        held = dict.fromkeys(weight for one in self.optimizers for weight in one.weights)
        groups = {}
        for weight in held:
            holders = tuple(one for one in self.optimizers if weight in one.weights)
            groups.setdefault(holders, {}).setdefault(old_of.get(weight), []).append(weight)
        self.sets = []
        for one in self.optimizers:
            one.sets = []
        for holders, by_old in groups.items():
            new = by_old.pop(None, [])
            if new:
                joined = next((old for old in by_old if not old.pending), GradientSet())
                by_old.setdefault(joined, []).extend(new)
            for old, weights in by_old.items():
                self.sets.append(old.part(weights, holders))
                if self.sets[-1].users and all(self.sets[-1].users.values()):
                    self.sets[-1].use_up(None)
                for one in holders:
                    one.sets.append(self.sets[-1])

    def sets_of(self, chosen):
        return list(dict.fromkeys(each for one in chosen for each in one.sets))

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
        """What a script may look at, by name; nothing where masters hear of a clearing only when they are needed."""
        # The half of a master that no model holds any more is written whenever somebody looks at it.
        placed = {id(p) for model in self.models for p in model.parameters()}
        looked_at = [(n, w) for n, w in enumerate(self.weights) if id(w.leaf) in placed or not w.has_master]
        found = {f"weight {n}": w.leaf.detach().clone() for n, w in looked_at}
        found |= {f"p.grad of weight {n}": clone(w.leaf.grad) for n, w in enumerate(self.weights)}
        for number, one in enumerate(self.optimizers):
            for index, weight in enumerate(one.weights):
                found[f"param {index} of optimizer {number}"] = weight.value.detach().clone()
                if not weight.cleared:
                    found[f"gradient of param {index} of optimizer {number}"] = clone(weight.value.grad)
        for number, scaler in enumerate(self.scalers):
            found[f"scaler {number}"] = scaler.scale, scaler.unskipped
        for number, model in enumerate(self.models):
            found |= {f"buffer {name} of model {number}": b.clone() for name, b in model.named_buffers()}
        return {**found, **self.saved, "skipped": self.skipped}

    def take(self, step):
        """Take one step of a program: "taken", or "refused" where amp must refuse it, or "impossible" now."""
        self.saved, self.skipped = {}, None
        try:
            possible = getattr(self, step["do"])(step) is not False
        except Refused:
            return "refused"
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
        late = [w for w, _ in late if self.owner(w) is None]
        programs.join(self.config, [one.torch for one in self.optimizers], [w.value for w in self.weights])
        self.joined = True
        self.welcome(late)
        self.look(self.optimizers)
        return True

    def welcome(self, late):
        """``late`` were held by no optimizer: what blocks have left them is scaled, by whatever scales."""
        self.list_weights()
        if self.has_scaled and any(scaler.dynamic or scaler.scale != 1.0 for scaler in self.scalers):
            for weight in late:
                if weight not in self.unscaled:
                    weight.leaf.grad = None
                    if weight.has_master:
                        weight.forget()
            for each in self.sets:
                each.old_overflow |= any(w.value.grad is not None for w in late if w in each.weights)

    def leave(self, step):
        one = self.optimizers[step["optimizer"]]
        if len(one.weights) < 2:
            return False
        weight = one.weights[-1]
        programs.leave(one.torch)
        weight.is_saved = True  # its master stays
        if not any(each.pending for each in self.sets if weight in each.weights):
            self.unscaled.add(weight)
        self.away.append((step["optimizer"], weight))
        self.changes += 1
        self.list_weights()
        self.look([one])
        return True

    def come_back(self, step):
        if not self.away or self.away[-1][1] in self.optimizers[self.away[-1][0]].weights:
            return False
        number, weight = self.away.pop()
        late = [] if self.owner(weight) else [weight]
        self.optimizers[number].torch.param_groups[0]["params"].append(weight.value)
        self.changes += 1
        self.welcome(late)
        self.look([self.optimizers[number]])
        return True

    def plain(self, step):
        """Run a backward pass outside any block, where its gradients cannot be taken for those of a block."""
        if any(w.leaf.grad is not None or w.value.grad is not None for w in self.weights):
            return False
        if any(each.waits or each.pending for each in self.sets):
            return False
        loss = self.loss(step)
        if loss.requires_grad:
            loss.backward()
        return True

    def block(self, step):
        self.note_scaled(step)
        chosen, scaler = [self.optimizers[n] for n in step["optimizers"]], self.scalers[step["loss_id"]]
        scale, loss = scaler.scale, self.loss(step)
        if self.idle:
            self.backward(loss, step)
            return
        self.begin(chosen, scale)
        self.open += chosen
        self.backward(loss.float() * scale, step)
        self.open = self.open[: -len(chosen)]
        if step["raises"]:
            self.put_back(chosen, scale)
        elif step["delay_unscale"]:
            held = [s for each in self.sets_of(chosen) if each.pending for s in each.pending.scalers]
            pending = Pending(scale, list(dict.fromkeys([scaler, *held])))
            for each in self.sets_of(chosen):
                each.pending, each.waits = pending, True
            self.note_users(chosen)
        else:
            self.end(chosen, scaler, scale, check=not step["delay_overflow_check"])

    def note_scaled(self, step):
        self.has_scaled = True
        scaler = self.scalers[step["loss_id"]]
        if scaler.dynamic or scaler.scale != 1.0:
            self.unscaled = set()

    def nested(self, step):
        """A block in a block."""
        self.note_scaled(step["outer"])
        outer, inner = step["outer"], step["inner"]
        sides = [[self.optimizers[n] for n in part["optimizers"]] for part in (outer, inner)]
        scalers = [self.scalers[part["loss_id"]] for part in (outer, inner)]
        losses = [self.loss(part) for part in (outer, inner)]
        if self.idle:
            self.backward_of(losses, step["how"])
            return
        scales = [scaler.scale for scaler in scalers]
        losses = [loss.float() * scale for loss, scale in zip(losses, scales, strict=True)]
        self.begin(sides[0], scales[0])
        if step["how"] == "outer first":
            self.backward_of(losses[:1])
            losses = losses[1:]
        self.open = sides[0]
        try:
            self.begin(sides[1], scales[1])
        except Refused:
            self.end(sides[0], scalers[0], scales[0])
            return
        finally:
            self.open = []
        self.backward_of(losses, step["how"])
        for side, scaler, scale in reversed(list(zip(sides, scalers, scales, strict=True))):
            self.end(side, scaler, scale)

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

    def refuse_open(self, chosen):
        """A block or a step of an optimizer that a block is open of, or that shares a weight with one."""
        if set(self.sets_of(chosen)) & set(self.sets_of(self.open)):
            raise Refused

    def backward_of(self, losses, how="apart"):
        for loss in [sum(losses)] if how == "together" else losses:
            if loss.requires_grad:
                loss.backward()

    def begin(self, chosen, scale):
        self.refuse_open(chosen)
        for each in self.sets_of(chosen):
            if each.pending:
                for weight in each.weights:
                    grad = weight.leaf.grad
                    if grad is not None:
                        weight.leaf.grad = (grad.float() * (scale / each.pending.scale)).to(grad.dtype)
                each.pending = Pending(scale, each.pending.scalers)
            else:
                each.save()
            each.forget_cleared()
            each.begin_anew(chosen)

    def put_back(self, chosen, scale):
        """What accumulated before the block is there again; its own gradients are not."""
        for each in self.sets_of(chosen):
            for weight in each.weights:
                weight.leaf.grad = each.saved.get(weight)
                if weight.leaf.grad is None:
                    weight.show(scale)
            each.saved, each.pending = {}, None

    def note_users(self, chosen):
        for one in chosen:
            for each in one.sets:
                if each.waits:
                    each.users.setdefault(one, False)

    def end(self, chosen, scaler, scale, check=True):
        self.end_sets(self.sets_of(chosen), scaler, scale, check)
        self.note_users(chosen)

    def end_sets(self, sets, scaler, scale, check=True):
        """Unscale, add up, note overflows, and move the scales."""
        overflow = False
        inverse = torch.tensor(1 / scale, dtype=torch.float32)
        for each in sets:
            for weight in each.weights:
                new, old = weight.leaf.grad, each.saved.get(weight)
                if new is None:
                    weight.leaf.grad = old if not weight.has_master else None
                    weight.show(scale)
                    continue
                each.waits = True
                overflow |= not bool(new.isfinite().all())
                unscaled = new.float() * inverse
                if weight.has_master:
                    weight.accumulate(unscaled)
                    weight.note()
                else:
                    unscaled = unscaled.to(new.dtype)
                    weight.leaf.grad = unscaled if old is None else unscaled + old
        others = dict.fromkeys(s for each in sets if each.pending for s in each.pending.scalers if s is not scaler)
        if check:
            scaler.update(overflow)
        else:
            scaler.put_off |= overflow and scaler.dynamic
            scaler.puts_off = scaler.dynamic
        for other in others:
            other.update(overflow)
        for each in sets:
            each.saved, each.pending = {}, None
            each.flags |= any(one.dynamic for one in (scaler, *others))
            each.overflow |= overflow and scaler.dynamic

    def step(self, step):
        one = self.optimizers[step["optimizer"]]
        self.refuse_open([one])
        for each in one.sets:
            if each.pending:
                self.end_pending(each)
        one.step()
        if step["asks"]:
            self.skipped = one.skipped

    def clear(self, step):
        who, how = step["who"], step["how"]
        if who == "optimizer":
            one = self.optimizers[step["optimizer"]]
            one.zero_grad(how == "none")
            return
        for weight in self.cleared_by(step):
            if who == "model":
                for each in self.sets:
                    each.saved.pop(weight, None)
            if how == "none":
                weight.leaf.grad = None
                if who == "model" and weight.has_master:
                    weight.forget()
                elif weight.shown is not None and weight.value.grad is not None:
                    weight.forget()
                    weight.cleared = True
            elif who == "model" and weight.has_master and (self.owner(weight) or weight.is_saved):
                weight.zero() if weight.leaf.grad is not None else weight.forget()
            elif weight.leaf.grad is not None:  # by hand: masters do not hear of it
                weight.leaf.grad.zero_()
        if who == "model":
            for each in self.sets:
                if set(each.weights) <= set(self.cleared_by(step)):
                    each.clear()

    def edit(self, step):
        """Edit the gradients of the model: those of masters stay as they are."""
        programs.edit([w.leaf.grad for w in self.weights if w.leaf.grad is not None], step["how"])

    def cleared_by(self, step):
        if step["who"] == "model":
            members = {id(p) for p in self.models[step["model"]].parameters()}
            return [w for w in self.weights if id(w.leaf) in members]
        return self.weights if step["who"] == "all" else [self.weights[step["weight"]]]

    def look(self, chosen):
        """Outside of blocks, a script that asks for masters finds their gradients unscaled."""
        if self.open:
            return
        for each in self.sets_of(chosen):
            if each.pending:
                self.end_pending(each)

    def end_pending(self, one):
        together = [other for other in self.sets if other.pending is one.pending]
        self.end_sets(together, one.pending.scalers[0], one.pending.scale)

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
            weight.leaf.grad, weight.cleared = None, False
            weight.forget()
        for one in self.optimizers:
            one.zero_grad()
        for scaler in self.scalers:
            scaler.put_off = scaler.puts_off = False
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
            scaler.scale, scaler.unskipped = scale, unskipped
        return True

    def tensors(self):
        return [w.value for w in self.weights if self.places(w)] + [b for m in self.models for b in m.buffers()]

    def state_dicts(self):
        return (
            [t.detach().clone() for t in self.tensors()],
            copy.deepcopy([one.torch.state_dict() for one in self.optimizers]),
            [(s.scale, s.unskipped) for s in self.scalers],
        )
