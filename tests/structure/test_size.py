"""How much there is to read: lines and files of ``ampcompat/amp``, fields of state, attributes of stash and master."""

import runpy
from dataclasses import fields
from pathlib import Path

import torch

from ampcompat import amp
from ampcompat._state import State
from ampcompat.amp.masters import Master
from ampcompat.amp.stash import AmpOptimizerState

SIZE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "architecture.py"))["size"]


def test_lines():
    assert SIZE()["lines"] <= 4800


def test_files():
    assert SIZE()["files"] <= 36


def test_fields_of_state():
    assert len(fields(State)) <= 12


def test_attributes():
    model = torch.nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    stash = optimizer._amp_stash
    assert len(vars(stash)) <= 12
    assert set(vars(stash)) == {field.name for field in fields(AmpOptimizerState)}
    assert isinstance(stash.masters[0], Master)
    assert len(vars(stash.masters[0])) <= 10
