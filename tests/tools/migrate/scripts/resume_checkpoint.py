import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument('--opt-level', default='O2')
    parser.add_argument('--workdir', default=None)
    parser.add_argument('--steps', type=int, default=8, help='per run')
    return parser.parse_args()


def make(device):
    return nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 1)).to(device)


def save(path, step, model, optimizer, scheduler):
    checkpoint = {
        'step': step,
        'model': model.state_dict(),
        'optimizer': optimizer.state_dict(),
        'scheduler': scheduler.state_dict(),
        'amp': amp.state_dict()
    }
    torch.save(checkpoint, path)


def restore(path, model, optimizer, scheduler):
    checkpoint = torch.load(path, map_location='cpu', weights_only=False)
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    scheduler.load_state_dict(checkpoint['scheduler'])
    amp.load_state_dict(checkpoint['amp'])
    return checkpoint['step']


def run(args, path, device, resume):
    torch.manual_seed(100 if resume else 0)
    model = make(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Initialization
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    start = 0
    if resume:
        start = restore(path, model, optimizer, scheduler)

    model.train()
    for step in range(start, start + args.steps):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(24, 10, generator=g).to(device)
        y = 0.15 * x[:, :3].prod(1, keepdim=True).tanh() + 0.1 * x[:, 4:5]
        loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        print('step', step, 'loss', loss.item())
    save(path, start + args.steps, model, optimizer, scheduler)


if __name__ == '__main__':
    args = parse_args()
    workdir = args.workdir or tempfile.mkdtemp()
    path = os.path.join(workdir, 'amp_checkpoint.pt')
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    run(args, path, device, resume=False)
    run(args, path, device, resume=True)
