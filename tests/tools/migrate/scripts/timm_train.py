#!/usr/bin/env python3
""" ImageNet Training Script, timm style
"""
import argparse
import logging
import time
from collections import OrderedDict
from contextlib import suppress

import torch
import torch.nn as nn

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as ApexDDP
    from apex.parallel import convert_syncbn_model
    has_apex = True
except ImportError:
    has_apex = False

has_native_amp = False
try:
    if getattr(torch.cuda.amp, 'autocast') is not None:
        has_native_amp = True
except AttributeError:
    pass

_logger = logging.getLogger('train')


class ApexScaler:
    state_dict_key = "amp"

    def __call__(self, loss, optimizer, clip_grad=None, clip_mode='norm', parameters=None, create_graph=False):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if clip_grad is not None:
            dispatch_clip_grad(amp.master_params(optimizer), clip_grad, mode=clip_mode)
        optimizer.step()

    def state_dict(self):
        if 'state_dict' in amp.__dict__:
            return amp.state_dict()

    def load_state_dict(self, state_dict):
        if 'load_state_dict' in amp.__dict__:
            amp.load_state_dict(state_dict)


def dispatch_clip_grad(parameters, value: float, mode: str = 'norm', norm_type: float = 2.0):
    if mode == 'norm':
        torch.nn.utils.clip_grad_norm_(parameters, value, norm_type=norm_type)
    elif mode == 'value':
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        assert False, f"Unknown clip mode ({mode})."


class ConvBnAct(nn.Sequential):
    def __init__(self, i, o, s=1):
        super().__init__(OrderedDict(conv=nn.Conv2d(i, o, 3, s, 1, bias=False), bn=nn.BatchNorm2d(o), act=nn.SiLU()))


class EffNet(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.stem = ConvBnAct(3, 8, 2)
        self.block = ConvBnAct(8, 16)
        self.classifier = nn.Linear(16, num_classes)

    def forward_features(self, x):
        return self.block(self.stem(x))

    def forward(self, x):
        x = self.forward_features(x)
        return self.classifier(x.mean((2, 3)))


def create_loader(n, seed, bs):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5))[y]
    x = x + 0.4 * torch.randn(n, 3, 8, 8, generator=g)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=bs)


parser = argparse.ArgumentParser(description='PyTorch ImageNet Training')
parser.add_argument('--lr', type=float, default=0.3)
parser.add_argument('--clip-grad', type=float, default=0.2)
parser.add_argument('--clip-mode', type=str, default='norm')
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--amp', action='store_true', default=False, help='use NVIDIA Apex AMP or Native AMP')
parser.add_argument('--apex-amp', action='store_true', default=False, help='Use NVIDIA Apex AMP mixed precision')
parser.add_argument('--seed', type=int, default=42)
parser.add_argument('--log-interval', type=int, default=1)


def main():
    args = parser.parse_args()
    args.device = 'cuda:0' if torch.cuda.is_available() else 'cpu'
    args.distributed = False

    # resolve AMP arguments based on PyTorch / Apex availability
    use_amp = None
    if args.amp:
        # `--amp` chooses apex before native amp here (ours is installed)
        if has_apex:
            args.apex_amp = True
    if args.apex_amp and has_apex:
        use_amp = 'apex'
    elif args.apex_amp:
        _logger.warning("APEX AMP not available, using float32. Install NVIDA apex")

    torch.manual_seed(args.seed)
    model = EffNet()
    model.to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    # setup automatic mixed-precision (AMP) loss scaling and op casting
    amp_autocast = suppress  # do nothing
    loss_scaler = None
    if use_amp == 'apex':
        model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
        loss_scaler = ApexScaler()
        _logger.info('Using NVIDIA APEX AMP. Training in mixed precision.')
    else:
        _logger.info('AMP not enabled. Training in float32.')

    if args.distributed:
        if has_apex and use_amp == 'apex':
            model = ApexDDP(model, delay_allreduce=True)
        else:
            model = nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank])

    loader_train = create_loader(48, 0, args.batch_size)
    loader_eval = create_loader(16, 1, args.batch_size)
    train_loss_fn = nn.CrossEntropyLoss().to(args.device)
    validate_loss_fn = nn.CrossEntropyLoss().to(args.device)

    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(
            epoch, model, loader_train, optimizer, train_loss_fn, args,
            amp_autocast=amp_autocast, loss_scaler=loss_scaler)
        eval_metrics = validate(model, loader_eval, validate_loss_fn, args, amp_autocast=amp_autocast)
        print('eval', epoch, 'loss', eval_metrics['loss'])
        state = {'epoch': epoch, 'state_dict': model.state_dict()}
        if loss_scaler is not None:
            state[loss_scaler.state_dict_key] = loss_scaler.state_dict()
    if loss_scaler is not None:
        loss_scaler.load_state_dict(state['amp'])


def train_one_epoch(
        epoch, model, loader, optimizer, loss_fn, args,
        lr_scheduler=None, output_dir=None, amp_autocast=suppress,
        loss_scaler=None, model_ema=None, mixup_fn=None):
    second_order = hasattr(optimizer, 'is_second_order') and optimizer.is_second_order
    losses_m = []

    model.train()

    end = time.time()
    last_idx = len(loader) - 1
    num_updates = epoch * len(loader)
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == last_idx
        input, target = input.to(args.device), target.to(args.device)

        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)

        if not args.distributed:
            losses_m.append(loss.item())

        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(
                loss, optimizer,
                clip_grad=args.clip_grad, clip_mode=args.clip_mode,
                parameters=model.parameters(),
                create_graph=second_order)
        else:
            loss.backward(create_graph=second_order)
            if args.clip_grad is not None:
                dispatch_clip_grad(
                    model.parameters(),
                    value=args.clip_grad, mode=args.clip_mode)
            optimizer.step()

        if last_batch or batch_idx % args.log_interval == 0:
            print('step', num_updates, 'loss', losses_m[-1])
        num_updates += 1
    return OrderedDict([('loss', sum(losses_m) / len(losses_m))])


def validate(model, loader, loss_fn, args, amp_autocast=suppress, log_suffix=''):
    losses = []
    model.eval()
    with torch.no_grad():
        for batch_idx, (input, target) in enumerate(loader):
            input, target = input.to(args.device), target.to(args.device)
            with amp_autocast():
                output = model(input)
            if isinstance(output, (tuple, list)):
                output = output[0]
            loss = loss_fn(output, target)
            losses.append(loss.data.item())
    return OrderedDict([('loss', sum(losses) / len(losses))])


if __name__ == '__main__':
    main()
