"""Faults at every line: a tracer that raises at a chosen line, and pictures of all that must be whole afterwards."""

import gc
import sys
from collections import Counter
from pathlib import Path

import torch

import ampcompat
from ampcompat._state import state
from ampcompat.amp.amp_model import AmpModel
from ampcompat.amp.master_index import master_of_half, master_of_value

HOME = str(Path(ampcompat.__file__).parent)
# The user's functions reach torch's optimizer loop and ours alike: what goes on inside a loop is the loop's business.
LOOPS = (f"{HOME}/optimizers", f"{HOME}/parallel")


class Fault(Exception):
    pass


class Tracer:
    """Calls ``at`` with each line of ampcompat that is about to run."""

    def __init__(self, at):
        self.at = at

    def __enter__(self):
        sys.settrace(self.globally)

    def __exit__(self, *exc):
        sys.settrace(None)

    def globally(self, frame, event, arg):
        name = frame.f_code.co_filename
        return self.locally if name.startswith(HOME) and not name.startswith(LOOPS) else None

    def locally(self, frame, event, arg):
        if event == "line":
            self.at((frame.f_code.co_filename[len(HOME) + 1 :], frame.f_lineno))
        return self.locally


def lines_of(call):
    """How often each line runs in ``call()``."""
    hits = Counter()
    with Tracer(lambda place: hits.update([place])):
        call()
    return hits


def interrupt(call, place, hit, kind):
    """Run ``call`` with ``kind`` raised at the ``hit``-th time that ``place`` is about to run; whether it was.

    Our own code may turn an exception into another one, or do without what failed; Ctrl-C must come through.
    """
    left = [hit]

    def at(here):
        if here == place:
            left[0] -= 1
            if left[0] == 0:
                raise kind(f"at {place}")

    try:
        with Tracer(at):
            call()
    except kind:
        return True
    except Exception:
        if kind is KeyboardInterrupt:
            raise
    return left[0] <= 0


def sweep(make, call, look, every=False, between=None):
    """Interrupt ``call(world)`` at each line that it runs; afterwards the world must look as before it or as after it.

    Where it looks as before, the call must do, when made again, what it does undisturbed.

    Args:
        make: Makes a world, always the same.
        call: What is interrupted.
        look: All of a world that must be whole, as a dict of plain values.
        every: Strike with both an exception and Ctrl-C, the first and the last time that a line runs, each time in a
            new world. Else with Ctrl-C the first time, and with an exception the last time where a line runs several
            times; and a world that looks as before serves for some strikes more.
        between: A call that does a part of what ``call`` does, whole in itself: the world may look as after it.
    """
    world = make()
    hits = lines_of(lambda: call(world))
    after = look(world)
    middle = None
    if between is not None:
        world = make()
        between(world)
        middle = look(world)
    broken, struck, planned, survived = [], 0, strikes(hits, every), []
    world = None
    for strike in planned:
        if world is None:
            world, survived = make(), []
            before = look(world)
        landed = interrupt(lambda world=world: call(world), *strike)
        struck += landed
        gc.collect(0)
        now = look(world)
        if landed and now in (before, middle):
            survived.append(strike)
            if now == before and len(survived) < (1 if every else 12) and strike is not planned[-1]:
                continue
            call(world)
            now = look(world)
            if now != after:
                broken.append(("called again after", *survived, differences(now, after)))
        elif now != after:
            closest = min(differences(now, before), differences(now, after), key=len)
            broken.append((strike, "after", len(survived), closest))
        world = None
    make_torch_whole()
    assert struck > 0.8 * len(planned) > 0, "too few lines were struck: is the tracer at work?"
    assert not broken, "\n".join(map(str, [f"{len(broken)} of {struck}", *broken[:12]]))


def strikes(hits, every):
    """Where, at which time, and with what a sweep strikes."""
    planned = []
    for place, count in sorted(hits.items()):
        if every:
            planned += [(place, hit, kind) for hit in sorted({1, count}) for kind in (Fault, KeyboardInterrupt)]
        else:
            planned.append((place, 1, KeyboardInterrupt))
            if count > 1:
                planned.append((place, count, Fault))
    return planned


def make_torch_whole():
    """What a broken call left in this thread must not break the next tests."""
    torch.set_grad_enabled(True)
    while torch.autocast_decrement_nesting() >= 0:
        pass
    torch.autocast_increment_nesting()


def differences(one, other):
    """What differs, cut short: a broken sweep has hundreds of such reports."""
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return {key: (str(one.get(key))[:60], str(other.get(key))[:60]) for key in keys[:4]}


def bits(tensor):
    if tensor is None:
        return None
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return f"{str(tensor.dtype)[6:]}{tensor.detach().float().flatten().tolist()}"


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return bits(value) if torch.is_tensor(value) else value


PLAIN = {
    "engine": lambda: torch.autograd._engine_run_backward,
    "apply": lambda: torch.autograd.function.BackwardCFunction.__dict__.get("apply"),
    "init": lambda: torch.autograd.function.BackwardCFunction.__dict__.get("__init__"),
    "enter": lambda: torch.amp.autocast_mode.autocast.__enter__,
    "exit": lambda: torch.amp.autocast_mode.autocast.__exit__,
    "cpu": lambda: torch.Tensor.__dict__.get("cpu"),
    "matmul": lambda: torch.matmul,
}
ORIGINALS = {name: read() for name, read in PLAIN.items()}


def torch_picture():
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    seen = {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), nesting),
        "cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "rules": torch._C._dispatch_has_kernel_for_dispatch_key("aten::rsqrt", "AutocastCPU"),
        "patched": [name for name, read in PLAIN.items() if read() is not ORIGINALS[name]],
        "tag": getattr(sys.modules.get("torch.compiler.config"), "cache_key_tag", ""),
    }
    room = state.rooms.get("casts")
    if room is not None:
        seen["thread"] = (room.thread.forwards, room.thread.off, room.thread.disabled)
        seen["ambient"] = (room.ambient.enabled, room.device_types if room.ambient.enabled else ())
    else:
        seen["thread"], seen["ambient"] = (0, 0, 0), (False, ())
    return seen


def model_picture(model):
    seen = {}
    for number, (name, module) in enumerate(model.named_modules()):
        hooks = [len(module._state_dict_hooks), len(module._load_state_dict_pre_hooks)]
        policy = module.__dict__.get("_amp_policy")
        seen[f"module {number} {name}"] = (
            isinstance(module, AmpModel),
            type(module).__name__,
            type(module.__dict__.get("forward")).__name__,
            hooks,
            None if policy is None else (policy.opt_level, policy.casts.enabled),
            module.__dict__.get("_amp_half"),
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        master = master_of_half(tensor)
        seen[f"tensor {name}"] = bits(tensor)
        seen[f"master {name}"] = None if master is None else bits(master.value)
        if master is None:
            seen[f"grad {name}"] = bits(tensor.grad)
    return seen


def optimizer_picture(optimizer, names):
    """``names``: of the model's tensors, by id."""

    def called(param):
        master = master_of_value(param)
        return names.get(id(param)) or f"master of {names.get(id(master and master.half))}"

    seen = {
        "groups": [[called(p) for p in group["params"]] for group in optimizer.param_groups],
        "methods": sorted(name for name in vars(optimizer) if name in OWN),
        "lent": sorted(name for name in vars(optimizer) if name in ("grad_scale", "found_inf")),
    }
    for param, values in optimizer.state.items():
        seen[f"state of {called(param)}"] = {name: plain(value) for name, value in values.items()}
    stash = vars(optimizer).get("_amp_stash")
    if stash is not None:
        scaled = stash.params_have_scaled_gradients
        seen["stash"] = (stash.session.properties.opt_level, len(stash.overflows), stash.in_block, stash.blocks, scaled)
        seen["aside"] = (len(stash.aside), len(stash.delayed_aside))
        for group in optimizer.param_groups:
            for param in group["params"]:
                stale = stash.stepped and master_of_value(param) is not None  # used up: the next block drops it
                seen[f"grad of {called(param)}"] = None if stale else bits(param.grad)
                master = master_of_value(param)
                if scaled and master is not None:
                    seen[f"half grad of {called(param)}"] = bits(master.half.grad)
    return seen


OWN = ("_amp_stash", "step", "zero_grad", "add_param_group", "_amp_lazy_init", "_post_amp_backward")


def amp_picture():
    values = dict(ampcompat.amp._amp_state._values())
    scalers = values.pop("loss_scalers", None)
    properties = values.pop("opt_properties", None)
    handle = values.pop("handle", None)
    session = state.rooms.get("latest session")
    return {
        "amp state": values,
        "shown": (
            None if properties is None else str(properties.options),
            type(handle).__name__,
            None if handle is None else handle.is_active(),
            None if session is None else session.properties.opt_level,
        ),
        "scalers": scalers and [scaler_picture(s) for s in scalers],
        "pending": state.rooms.get("pending scalers"),
        "rooms": [name in state.rooms for name in ("choke points",)],
    }


def scaler_picture(scaler):
    uncounted = None if scaler._uncounted is None else scaler._uncounted.item()
    return scaler.loss_scale(), scaler._unskipped, uncounted, len(scaler._found_inf)


def whole_picture(models, optimizers):
    """All that a call of amp may change, as plain values."""
    seen = {**torch_picture(), **amp_picture()}
    names = {}
    for number, model in enumerate(models):
        seen.update({f"model {number} {key}": value for key, value in model_picture(model).items()})
        names.update({id(p): f"{number}.{name}" for name, p in model.named_parameters()})
    for number, optimizer in enumerate(optimizers):
        seen.update({f"optimizer {number} {key}": value for key, value in optimizer_picture(optimizer, names).items()})
    return seen
