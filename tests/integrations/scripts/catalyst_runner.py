"""catalyst's SupervisedRunner on its APEXEngine, which forwards every default of amp.initialize's signature."""

import json
import sys
import tempfile

import torch
from catalyst import dl
from torch import nn


class Losses(dl.Callback):
    def __init__(self, level):
        super().__init__(order=dl.CallbackOrder.External)
        self.level = level

    def on_batch_end(self, runner):
        print(json.dumps({"level": self.level, "loss": float(runner.batch_metrics["loss"])}), flush=True)


def train(level, folder):
    torch.manual_seed(0)
    y = torch.arange(160) % 4
    x = torch.randn(160, 8) + y.view(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    runner = dl.SupervisedRunner(input_key="features", output_key="logits", target_key="targets", loss_key="loss")
    runner.train(
        engine=dl.APEXEngine("cpu", {"opt_level": level}), model=model, criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4), loaders={"train": loader, "valid": loader},
        num_epochs=5, logdir=folder, valid_loader="valid", valid_metric="loss", minimize_valid_metric=True,
        load_best_on_end=True, callbacks={"losses": Losses(level)})
    assert model[0].weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)


for level in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        train(level, folder)
