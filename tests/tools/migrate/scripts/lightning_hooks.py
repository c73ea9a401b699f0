"""A minimal copy of an early pytorch-lightning: the Trainer owns amp, the module offers hooks."""
import inspect

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from apex import amp
except ImportError:
    APEX_AVAILABLE = False
else:
    APEX_AVAILABLE = True


class ModelHooks(nn.Module):
    def on_epoch_start(self):
        pass

    def on_before_zero_grad(self, optimizer):
        pass

    def on_after_backward(self):
        pass

    def backward(self, trainer, loss, optimizer, optimizer_idx):
        loss.backward()

    def configure_apex(self, amp, model, optimizers, amp_level):
        """Override to init AMP your own way. Must return a model and list of optimizers."""
        model, optimizers = amp.initialize(
            model, optimizers, opt_level=amp_level,
        )
        return model, optimizers

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, second_order_closure=None):
        optimizer.step()
        optimizer.zero_grad()


class LightningModule(ModelHooks):
    def __init__(self):
        super().__init__()
        self.trainer = None
        self.current_epoch = 0
        self.use_amp = False

    def training_step(self, *args, **kwargs):
        raise NotImplementedError


class Trainer(object):
    def __init__(self, max_epochs=2, precision=32, amp_level='O1', gradient_clip_val=0,
                 accumulate_grad_batches=1, track_grad_norm=-1):
        self.max_epochs = max_epochs
        self.precision = precision
        self.amp_level = amp_level
        self.gradient_clip_val = gradient_clip_val
        self.accumulate_grad_batches = accumulate_grad_batches
        self.track_grad_norm = track_grad_norm
        self.use_amp = False
        self.init_amp(precision == 16)
        self.global_step = 0

    def init_amp(self, use_amp):
        self.use_amp = use_amp and APEX_AVAILABLE
        if use_amp and not APEX_AVAILABLE:
            raise ModuleNotFoundError("""
            You set `use_amp=True` but do not have apex installed.
            Install apex first using this guide and rerun with use_amp=True:
            https://github.com/NVIDIA/apex#linux
            """)

    def fit(self, model):
        model.trainer = self
        self.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        model.to(self.device)
        self.optimizers = model.configure_optimizers()
        if not isinstance(self.optimizers, list):
            self.optimizers = [self.optimizers]
        if self.use_amp:
            # An example
            model, optimizers = model.configure_apex(amp, model, self.optimizers, self.amp_level)
            self.optimizers = optimizers
        self.model = model
        self.run_training()

    def run_training(self):
        for epoch in range(self.max_epochs):
            self.model.current_epoch = epoch
            if 'on_epoch_start' in dir(self.model) and inspect.ismethod(self.model.on_epoch_start):
                self.model.on_epoch_start()
            self.model.train()
            for batch_idx, batch in enumerate(self.model.train_dataloader()):
                self.run_training_batch(batch, batch_idx)
            self.run_evaluation(epoch)

    def run_training_batch(self, batch, batch_idx):
        batch = [t.to(self.device) for t in batch]
        for opt_idx, optimizer in enumerate(self.optimizers):
            output = self.model.training_step(batch, batch_idx)
            loss = output['loss'] / self.accumulate_grad_batches

            # backward pass
            if self.use_amp:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    self.model.backward(self, scaled_loss, optimizer, opt_idx)
            else:
                self.model.backward(self, loss, optimizer, opt_idx)
            self.model.on_after_backward()

            if (batch_idx + 1) % self.accumulate_grad_batches == 0:
                self.clip_gradients()
                self.model.optimizer_step(self.model.current_epoch, batch_idx, optimizer, opt_idx)
            print('step', self.global_step, 'loss', output['loss'].item())
            self.global_step += 1

    def clip_gradients(self):
        if self.gradient_clip_val > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.gradient_clip_val)

    def run_evaluation(self, epoch):
        self.model.eval()
        outs = []
        with torch.no_grad():
            for batch_idx, batch in enumerate(self.model.val_dataloader()):
                batch = [t.to(self.device) for t in batch]
                outs.append(self.model.validation_step(batch, batch_idx))
        res = self.model.validation_epoch_end(outs)
        print('eval', epoch, 'loss', res['val_loss'].item())


class CoolSystem(LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.l1 = nn.Linear(20, 32)
        self.l2 = nn.Linear(32, 4)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.view(x.size(0), -1))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.forward(x)
        return {'loss': F.cross_entropy(y_hat, y)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        return {'val_loss': F.cross_entropy(y_hat, y)}

    def validation_epoch_end(self, outputs):
        return {'val_loss': torch.stack([x['val_loss'] for x in outputs]).mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams['lr'], momentum=0.9)

    def train_dataloader(self):
        return DataLoader(make_set(0), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(make_set(1), batch_size=16)


def make_set(seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (56,), generator=g)
    protos = torch.randn(4, 20, generator=torch.Generator().manual_seed(50))
    return TensorDataset(protos[y] + torch.randn(56, 20, generator=g), y)


if __name__ == '__main__':
    torch.manual_seed(2334)
    system = CoolSystem({'lr': 0.1})
    trainer = Trainer(max_epochs=2, precision=16, gradient_clip_val=0.5)
    trainer.fit(system)
