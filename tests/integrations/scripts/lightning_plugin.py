"""pytorch-lightning's apex plugin by its flags and as an object, automatic and manual optimization, with a checkpoint."""

import json
import sys
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import ApexMixedPrecisionPlugin
from torch import nn


class Host(pl.accelerators.Accelerator):
    """This machine, for `Trainer(amp_backend="apex", precision=16)`: that is refused for Lightning's own CPUAccelerator."""

    cpu = pl.accelerators.CPUAccelerator()
    setup_device, get_device_stats, teardown = cpu.setup_device, cpu.get_device_stats, cpu.teardown
    parse_devices, get_parallel_devices = cpu.parse_devices, cpu.get_parallel_devices
    auto_device_count, is_available = cpu.auto_device_count, cpu.is_available


class Module(pl.LightningModule):
    def __init__(self, level, manual):
        super().__init__()
        self.level, self.automatic_optimization = level, not manual
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        print(json.dumps({"level": self.level, "loss": loss.item()}), flush=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


def train(level, folder, how):
    manual = how == "manual"
    pl.seed_everything(0)
    y = torch.arange(160) % 4
    x = torch.randn(160, 8) + y.view(-1, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    module = Module(level, manual)
    automatic = {} if manual else {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    if how == "flags":
        precision = {"accelerator": Host(), "devices": 1, "amp_backend": "apex", "amp_level": level, "precision": 16}
    else:
        precision = {"accelerator": "cpu", "plugins": [ApexMixedPrecisionPlugin(level)]}
    trainer = pl.Trainer(max_epochs=4, logger=False, default_root_dir=folder, enable_progress_bar=False,
                         enable_model_summary=False, **precision, **automatic)
    trainer.fit(module, loader, loader)
    assert module.body[0].weight.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    assert hasattr(trainer.optimizers[0], "_amp_stash")
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert "loss_scaler0" in checkpoint["ApexMixedPrecisionPlugin"], list(checkpoint)
    assert checkpoint["state_dict"]["body.0.weight"].dtype == torch.float32


for level in sys.argv[1:]:
    for how in ("flags", "plugin", "manual"):
        with tempfile.TemporaryDirectory() as folder:
            train(level, folder, how)
