"""Training loop as a generator: whoever consumes it decides when to stop, log, evaluate."""
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp


@contextmanager
def evaluating(net):
    '''Temporarily switch to evaluation mode.'''
    istrain = net.training
    try:
        net.eval()
        yield net
    finally:
        if istrain:
            net.train()


def endless(x, y, bs, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(x), generator=g)
        for i in range(0, len(x) - bs + 1, bs):
            yield x[order[i:i + bs]], y[order[i:i + bs]]


def training(net, opt, stream, max_grad=None):
    net.train()
    for x, y in stream:
        pred = net(x)
        loss = F.cross_entropy(pred, y)
        opt.zero_grad()
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        if max_grad:
            nn.utils.clip_grad_norm_(amp.master_params(opt), max_grad)
        opt.step()
        yield loss.item()


def evaluate(net, x, y):
    with evaluating(net), torch.no_grad():
        return F.cross_entropy(net(x), y).item()


def with_lr_decay(losses, opt, every, gamma):
    for i, l in enumerate(losses, 1):
        yield l
        if i % every == 0:
            for group in opt.param_groups:
                group['lr'] *= gamma


def main():
    torch.manual_seed(40)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    x = torch.randn(120, 15, device=device)
    y = (x[:, :4].argmax(1))
    net = nn.Sequential(nn.Linear(15, 40), nn.ELU(), nn.LayerNorm(40), nn.Linear(40, 4)).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.8)
    net, opt = amp.initialize(net, opt, opt_level='O1', verbosity=0)

    losses = training(net, opt, endless(x[:96], y[:96], 12, 0), max_grad=0.3)
    losses = with_lr_decay(losses, opt, 8, 0.5)
    for step, loss in zip(range(16), losses):
        print('step', step, 'loss', loss)
        if step % 8 == 7:
            print('eval', step, 'loss', evaluate(net, x[96:], y[96:]))


if __name__ == '__main__':
    main()
