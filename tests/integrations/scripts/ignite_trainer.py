"""pytorch-ignite's supervised trainer in its apex mode, with accumulation."""

import json
import sys

import torch
from apex import amp
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch import nn


def train(level):
    torch.manual_seed(0)
    y = torch.arange(160) % 4
    x = torch.randn(160, 8) + y.view(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), amp_mode="apex", gradient_accumulation_steps=2)

    @trainer.on(Events.ITERATION_COMPLETED)
    def log(engine):
        print(json.dumps({"level": level, "loss": engine.state.output}), flush=True)

    trainer.run(loader, max_epochs=5)
    assert model[0].weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
    assert evaluator.run(loader).metrics["accuracy"] > 0.5


for level in sys.argv[1:]:
    train(level)
