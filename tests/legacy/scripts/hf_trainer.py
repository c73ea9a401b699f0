import importlib.metadata
import importlib.util
import json
import os

import torch
from torch import nn


def is_apex_available():
    return importlib.util.find_spec("apex") is not None and importlib.metadata.version("apex") is not None


if is_apex_available():
    from apex import amp


class TrainingArguments:
    fp16 = True
    fp16_opt_level = "O1"
    gradient_accumulation_steps = 2
    max_grad_norm = 1.0
    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model.to(args.device), args
        self.use_apex = args.fp16
        if args.fp16 and not is_apex_available():
            raise ImportError("Using FP16 with APEX but APEX is not installed")

    def create_optimizer(self):
        try:
            from apex.optimizers import FusedAdam
            self.optimizer = FusedAdam(self.model.parameters(), lr=5e-3, bias_correction=True, eps=1e-6)
        except ImportError:
            raise ValueError("Trainer tried to instantiate apex FusedAdam but apex is not installed!")
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.1, 1 - step / 60))

    def _wrap_model(self, model):
        if self.use_apex:
            model, self.optimizer = amp.initialize(model, self.optimizer, opt_level=self.args.fp16_opt_level)
        if self.args.local_rank != -1:
            model = nn.parallel.DistributedDataParallel(model)
        return model

    def training_step(self, model, inputs):
        model.train()
        loss = model(**inputs)["loss"]
        if self.args.gradient_accumulation_steps > 1:
            loss = loss / self.args.gradient_accumulation_steps
        if self.use_apex:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        return loss.detach() * self.args.gradient_accumulation_steps

    def train(self):
        self.create_optimizer()
        model = self._wrap_model(self.model)
        model.zero_grad()
        for step in range(60):
            x = torch.randn(16, 8, device=self.args.device)
            tr_loss = self.training_step(model, {"x": x, "labels": x.sum(-1, keepdim=True)})
            if (step + 1) % self.args.gradient_accumulation_steps == 0:
                nn.utils.clip_grad_norm_(
                    amp.master_params(self.optimizer) if self.use_apex else model.parameters(), self.args.max_grad_norm)
                self.optimizer.step()
                self.lr_scheduler.step()
                model.zero_grad()
            if self.args.local_rank in (-1, 0):
                print(json.dumps({"step": step, "loss": tr_loss.item()}))


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels=None):
        out = self.body(x)
        return {"loss": nn.functional.mse_loss(out.float(), labels.float()), "logits": out}


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    Trainer(Regression(), TrainingArguments()).train()
