"""mmengine's Runner with an ApexOptimWrapper, and a resume from its checkpoint."""

import json
import sys
import tempfile

import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, y, mode="loss"):
        return {"loss": nn.functional.cross_entropy(self.body(x), y)}


class Losses(Hook):
    def __init__(self, level):
        self.level = level

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        print(json.dumps({"level": self.level, "loss": float(outputs["loss"])}), flush=True)


def runner(level, folder, epochs, **more):
    torch.manual_seed(0)
    y = torch.arange(160) % 4
    x = torch.randn(160, 8) + y.view(-1, 1)
    data = torch.utils.data.TensorDataset(x, y)
    wrapper = {"type": "ApexOptimWrapper", "opt_level": level, "optimizer": {"type": "Adam", "lr": 1e-2, "eps": 1e-4},
               "accumulative_counts": 2, "clip_grad": {"max_norm": 1.0}}
    return Runner(
        Net(), folder, train_dataloader={"dataset": data, "batch_size": 16, "num_workers": 0, "sampler": {
            "type": "DefaultSampler", "shuffle": False}, "collate_fn": {"type": "default_collate"}},
        train_cfg={"by_epoch": True, "max_epochs": epochs}, optim_wrapper=wrapper, custom_hooks=[Losses(level)],
        default_scope="mmengine", experiment_name=level + str(epochs), log_level="ERROR", **more)


def train(level, folder):
    first = runner(level, folder, 4)
    first.train()
    assert first.model.body[0].weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    saved = torch.load(f"{folder}/epoch_4.pth", weights_only=False)
    assert "loss_scaler0" in saved["optimizer"]["apex_amp"]
    assert saved["state_dict"]["body.0.weight"].dtype == torch.float32
    again = runner(level, folder, 6, load_from=f"{folder}/epoch_4.pth", resume=True)
    again.train()
    assert again.epoch == 6


for level in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        train(level, folder)
