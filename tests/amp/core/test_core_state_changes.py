"""Which attributes change when in one warm step at O2: the table ``STATE_CHANGES``, compared with what changes."""

import dataclasses
import re

import pytest
import torch
from internals import end_watch, masters_of, process_state, stash_of
from state_tables import STATE_CHANGES

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]

WARM = 12  # steps after which masters are compared by value no more


class Kept(torch.nn.Linear):
    """A layer that stays float32."""


class Seen:
    """An object, held so that its id is not given to another, and what a tensor held."""

    def __init__(self, value):
        self.value = value
        self.numbers = repr(value.tolist()) if isinstance(value, torch.Tensor) else None

    def __eq__(self, other):
        if not isinstance(other, Seen) or self.numbers != other.numbers:
            return False
        if isinstance(self.value, int):  # an address, say
            return self.value == other.value
        return self.value is other.value


def token(value):
    """What an attribute is now, to be compared with what it is later."""
    if isinstance(value, (list, tuple)):
        return [part if isinstance(part, (int, float)) else id(part) for part in value], list(value)
    if isinstance(value, dict):
        return list(map(id, (*value, *value.values()))), list(value.items())
    return Seen(value)


def differ(before, now):
    """Whether two tokens differ; the second part of a container's holds what its ids are of."""
    if isinstance(before, tuple) and isinstance(now, tuple):
        return before[0] != now[0]
    return before != now


def attributes(owner):
    names = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else vars(owner)
    return {name: getattr(owner, name) for name in names}


class Watched:
    """The objects of one optimizer whose state changes, as the table names it."""

    def __init__(self, model, optimizer):
        self.scaler = amp._amp_state.loss_scalers[0]
        self.stash = stash_of(optimizer)
        self.master = masters_of(model)[0]

    def state(self):
        master = attributes(self.master)
        for side in ("half", "value"):
            master[f"{side}.grad"] = master[side].grad
        states = (attributes(self.scaler), attributes(self.stash), process_state(), master)
        return [{name: token(value) for name, value in state.items()} for state in states]


def changed(before, now):
    """The names that changed, for each object."""
    return tuple(
        {name for name in new if differ(old.get(name), new[name])} for old, new in zip(before, now, strict=True)
    )


def names_in(cell):
    return set(re.findall(r"(?:^|; )`([\w.]+)`", cell))


def warm_run():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Kept(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale="dynamic", keep_fp32=Kept, verbosity=0
    )
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**8  # no step but the one below overflows
    x = torch.ones(3, 4)
    end_watch()
    for _ in range(WARM):
        with amp.scale_loss(model(x).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, x


@pytest.mark.parametrize("end", ["made", "skipped"])
def test_what_changes_in_a_step_is_what_the_table_says(end):
    model, optimizer, x = warm_run()
    watched = Watched(model, optimizer)
    seen = {}

    def during(moment, action):
        before = watched.state()
        result = action()
        seen[moment] = changed(before, watched.state())
        return result

    factor = float("inf") if end == "skipped" else 1.0
    loss = during("`model(x)`", lambda: model(x).mean() * factor)
    block = amp.scale_loss(loss, optimizer)
    scaled = during("block begins", block.__enter__)
    during("`backward`", scaled.backward)
    during("block ends" if end == "made" else "block ends, overflow", lambda: block.__exit__(None, None, None))
    during(f"`step`, {end}", optimizer.step)
    assert amp.step_was_skipped(optimizer) is (end == "skipped")
    during("`zero_grad`", optimizer.zero_grad)
    said = {row[0]: tuple(map(names_in, row[1:])) for row in STATE_CHANGES.rows}
    assert seen == {moment: said[moment] for moment in seen}
