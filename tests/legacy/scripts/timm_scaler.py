import copy
import json
import os

import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
    from apex.parallel import convert_syncbn_model
    has_apex = True
except ImportError:
    has_apex = False
try:
    if getattr(torch.cuda.amp, 'autocast') is not None:
        has_native_amp = True
except AttributeError:
    has_native_amp = False


class ApexScaler:
    state_dict_key = "amp"

    def __call__(self, loss, optimizer, clip_grad=None, create_graph=False, need_update=True):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
            optimizer.step()

    def state_dict(self):
        if 'state_dict' in amp.__dict__:
            return amp.state_dict()

    def load_state_dict(self, state_dict):
        if 'load_state_dict' in amp.__dict__:
            amp.load_state_dict(state_dict)


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1. - self.decay) * model_v)


def main():
    assert has_apex
    distributed = int(os.environ.get('WORLD_SIZE', 1)) > 1
    rank = int(os.environ.get('RANK', 0))
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if distributed:
        torch.distributed.init_process_group(backend='nccl' if torch.cuda.is_available() else 'gloo')
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Linear(24, 4)).to(device)
    if distributed and torch.cuda.is_available():
        model = convert_syncbn_model(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.9, eps=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    loss_scaler = ApexScaler()
    model_ema = ModelEmaV2(model)
    if distributed:
        model = ApexDDP(model, delay_allreduce=True)
    loss_fn = nn.CrossEntropyLoss()
    for step in range(30):
        target = torch.randint(0, 4, (16,), device=device)
        input = torch.randn(16, 10, device=device) + target.view(-1, 1).float()
        loss = loss_fn(model(input), target)
        optimizer.zero_grad(set_to_none=True)
        loss_scaler(loss, optimizer, clip_grad=1.0)
        model_ema.update(model.module if distributed else model)
        if rank == 0:
            print(json.dumps({'step': step, 'loss': loss.item()}))
    loss_scaler.load_state_dict(loss_scaler.state_dict())
    with torch.no_grad():
        assert torch.isfinite(loss_fn(model_ema.module(input).float(), target))


if __name__ == '__main__':
    main()
