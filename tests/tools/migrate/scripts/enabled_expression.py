#!/usr/bin/env python3
import argparse
import random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from apex import amp


class Options:
    def __init__(self):
        p = argparse.ArgumentParser()
        p.add_argument('--fp16', dest='fp16', action='store_true', default=True)
        p.add_argument('--fp32', dest='fp16', action='store_false')
        p.add_argument('--device', default='auto')
        p.add_argument('--steps', default=15, type=int)
        p.add_argument('--lr', default=.3, type=float)
        self.parser = p

    def parse(self):
        opts = self.parser.parse_args()
        if opts.device == 'auto':
            opts.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        return opts


class UNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.d1 = nn.Conv2d(1, ch, 3, padding=1)
        self.d2 = nn.Conv2d(ch, ch * 2, 3, padding=1)
        self.u1 = nn.ConvTranspose2d(ch * 2, ch, 2, 2)
        self.last = nn.Conv2d(ch * 2, 1, 1)
        self.n1, self.n2 = nn.BatchNorm2d(ch), nn.BatchNorm2d(ch * 2)

    def forward(self, x):
        e1 = F.relu(self.n1(self.d1(x)))
        e2 = F.relu(self.n2(self.d2(F.max_pool2d(e1, 2))))
        u = torch.cat([self.u1(e2), e1], dim=1)
        return self.last(u)


def train(opts):
    random.seed(opts.steps); np.random.seed(opts.steps); torch.manual_seed(opts.steps)
    net = UNet().to(opts.device)
    optimizer = torch.optim.SGD(net.parameters(), opts.lr, momentum=.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, opts.lr, total_steps=opts.steps + 1) if False else None
    net, optimizer = amp.initialize(net, optimizer, opt_level='O1', enabled=opts.fp16, loss_scale='dynamic')
    for it in range(opts.steps):
        img = torch.randn(4, 1, 8, 8, device=opts.device)
        mask = (F.avg_pool2d(img, 3, 1, 1) > 0.1).float()
        logits = net(img)
        loss = F.binary_cross_entropy_with_logits(logits, mask)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if scheduler: scheduler.step()
        print('step', it, 'loss', loss.item())


if __name__ == "__main__":
    train(Options().parse())
