"""A catalyst-like runner: state object, callbacks, one of them owns backward and step."""
from collections import OrderedDict
from typing import Dict, List

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from apex import amp
    APEX = True
except ImportError:
    APEX = False


class State:
    def __init__(self, model, criterion, optimizer, scheduler):
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.input = self.output = None
        self.loss = None
        self.global_step = 0
        self.epoch = 0
        self.loader_name = "train"
        self.metrics: Dict[str, float] = {}
        self.is_train_loader = True


class Callback:
    order = 0

    def on_stage_start(self, state): pass
    def on_loader_start(self, state): pass
    def on_batch_start(self, state): pass
    def on_batch_end(self, state): pass
    def on_loader_end(self, state): pass


class CriterionCallback(Callback):
    order = 20

    def on_batch_end(self, state):
        state.loss = state.criterion(state.output, state.input[1])
        state.metrics["loss"] = state.loss.item()


class OptimizerCallback(Callback):
    """Optimizer callback, abstraction over optimizer step."""
    order = 40

    def __init__(self, grad_clip_params: Dict = None, accumulation_steps: int = 1):
        self.accumulation_steps = accumulation_steps
        self.grad_clip_params = grad_clip_params
        self._accumulation_counter = 0
        self.fp16 = False

    @staticmethod
    def grad_step(*, optimizer, grad_clip_params=None, fp16=False):
        for group in optimizer.param_groups:
            if grad_clip_params is not None:
                nn.utils.clip_grad_norm_(group["params"], **grad_clip_params)
        optimizer.step()

    def on_stage_start(self, state):
        self.fp16 = isinstance(state.model, nn.Module) and APEX

    def on_batch_end(self, state):
        if not state.is_train_loader:
            return
        self._accumulation_counter += 1
        need_gradient_step = (self._accumulation_counter + 1) % self.accumulation_steps == 0
        loss = state.loss
        if self.fp16:
            # Need to set ``delay_unscale``
            # according to https://nvidia.github.io/apex/advanced.html#gradient-accumulation-across-iterations
            delay_unscale = not need_gradient_step
            with amp.scale_loss(loss, state.optimizer, delay_unscale=delay_unscale) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()

        if need_gradient_step:
            self.grad_step(optimizer=state.optimizer, grad_clip_params=self.grad_clip_params, fp16=self.fp16)
            state.model.zero_grad()
            self._accumulation_counter = 0


class SchedulerCallback(Callback):
    order = 60

    def on_loader_end(self, state):
        if state.is_train_loader and state.scheduler is not None:
            state.scheduler.step()


class PrintCallback(Callback):
    order = 100

    def on_batch_end(self, state):
        if state.is_train_loader:
            print("step", state.global_step, "loss", state.metrics["loss"])

    def on_loader_end(self, state):
        if not state.is_train_loader:
            print("eval", state.epoch, "loss", state.metrics["loss"])


class Runner:
    def __init__(self, device=None):
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.callbacks: List[Callback] = []
        self.state = None

    def _event(self, name):
        for callback in self.callbacks:
            getattr(callback, f"on_{name}")(self.state)

    def process_components(self, model, criterion, optimizer, scheduler, fp16):
        model = model.to(self.device)
        if fp16:
            params = {"opt_level": "O1", **(fp16 if isinstance(fp16, dict) else {})}
            model, optimizer = amp.initialize(model, optimizer, **params)
        return model, criterion.to(self.device), optimizer, scheduler

    def train(self, *, model, criterion, optimizer, loaders, callbacks, scheduler=None, num_epochs=2, fp16=None):
        model, criterion, optimizer, scheduler = self.process_components(model, criterion, optimizer, scheduler, fp16)
        self.state = State(model, criterion, optimizer, scheduler)
        self.callbacks = sorted(callbacks, key=lambda c: c.order)
        self._event("stage_start")
        for self.state.epoch in range(num_epochs):
            for name, loader in loaders.items():
                self.state.loader_name = name
                self.state.is_train_loader = name.startswith("train")
                self.state.model.train(self.state.is_train_loader)
                self._event("loader_start")
                with torch.set_grad_enabled(self.state.is_train_loader):
                    for batch in loader:
                        self.state.input = [t.to(self.device) for t in batch]
                        self._event("batch_start")
                        self.state.output = self.state.model(self.state.input[0])
                        self._event("batch_end")
                        self.state.global_step += self.state.is_train_loader
                self._event("loader_end")


def main():
    torch.manual_seed(321)
    x = torch.randn(80, 18)
    y = (x[:, :5].sum(1) > 0).long()
    loaders = OrderedDict(
        train=DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True),
        valid=DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16),
    )
    model = nn.Sequential(nn.Linear(18, 24), nn.PReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6)
    Runner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7),
        loaders=loaders,
        callbacks=[PrintCallback(), OptimizerCallback({"max_norm": 0.3}), CriterionCallback(), SchedulerCallback()],
        fp16={"opt_level": "O1"},
    )


if __name__ == "__main__":
    main()
