"""Person re-identification baseline, single node; multi-gpu with DataParallel or apex DDP."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import apex
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model


def arg_parser():
    p = argparse.ArgumentParser()
    p.add_argument('--local_rank', type=int, default=0)
    p.add_argument('--distributed', action='store_true')
    p.add_argument('--sync-bn', action='store_true')
    p.add_argument('--fp16', type=int, default=1)
    p.add_argument('--epochs', type=int, default=2)
    return p


class BNNeck(nn.Module):
    def __init__(self, n_class=6, feat=16):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, feat))
        self.bottleneck = nn.BatchNorm1d(feat)
        self.bottleneck.bias.requires_grad_(False)  # no shift
        self.classifier = nn.Linear(feat, n_class, bias=False)

    def forward(self, x):
        global_feat = self.base(x)
        feat = self.bottleneck(global_feat)
        if self.training:
            return self.classifier(feat), global_feat
        return feat


class TripletLoss(object):
    def __init__(self, margin=0.3):
        self.ranking_loss = nn.MarginRankingLoss(margin=margin)

    def __call__(self, global_feat, labels):
        n = global_feat.size(0)
        dist = torch.pow(global_feat, 2).sum(1, keepdim=True).expand(n, n)
        dist = dist + dist.t() - 2 * global_feat @ global_feat.t()
        dist = dist.clamp(min=1e-12).sqrt()
        is_pos = labels[:, None].eq(labels[None, :])
        dist_ap = torch.where(is_pos, dist, torch.zeros_like(dist)).max(1)[0]
        dist_an = torch.where(is_pos, torch.full_like(dist, 1e4), dist).min(1)[0]
        y = torch.ones_like(dist_an)
        return self.ranking_loss(dist_an, dist_ap, y)


def make_optimizer(model):
    params = []
    for key, value in model.named_parameters():
        if not value.requires_grad:
            continue
        lr = 0.05
        weight_decay = 5e-4
        if "bias" in key:
            lr = lr * 2
            weight_decay = 0
        params += [{"params": [value], "lr": lr, "weight_decay": weight_decay}]
    return torch.optim.SGD(params, momentum=0.9)


def pk_batches(epoch, n):
    g = torch.Generator().manual_seed(epoch)
    centers = torch.randn(6, 24, generator=torch.Generator().manual_seed(100))
    for _ in range(n):
        ids = torch.randperm(6, generator=g)[:4].repeat_interleave(4)
        yield centers[ids] + 0.8 * torch.randn(16, 24, generator=g), ids


def do_train(args, model, train_batches, optimizer, loss_fn, device):
    n_iter = 0
    for epoch in range(args.epochs):
        model.train()
        for img, vid in train_batches(epoch, 7):
            optimizer.zero_grad()
            img = img.to(device)
            target = vid.to(device)
            score, feat = model(img)
            loss = loss_fn(score, feat, target)
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
            print('step', n_iter, 'loss', loss.item())
            n_iter += 1
        if args.local_rank == 0:
            do_inference(model, train_batches, epoch, device)


def do_inference(model, batches, epoch, device):
    model.eval()
    feats = []
    for img, vid in batches(1000, 2):
        with torch.no_grad():
            feats.append(F.normalize(model(img.to(device)).float()))
    sim = feats[0] @ feats[1].t()
    print('eval', epoch, 'sim', sim.abs().mean().item())


def main():
    args = arg_parser().parse_args()
    torch.manual_seed(1234)
    if args.distributed:
        torch.cuda.set_device(args.local_rank)
        torch.distributed.init_process_group(backend='nccl', init_method='env://')
    device = torch.device('cuda', args.local_rank) if torch.cuda.is_available() else torch.device('cpu')

    model = BNNeck()
    if args.sync_bn:
        model = convert_syncbn_model(model)
    model.to(device)
    optimizer = make_optimizer(model)
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    if args.distributed:
        model = DistributedDataParallel(model, delay_allreduce=True)
    else:
        model = nn.DataParallel(model)

    xent, triplet = nn.CrossEntropyLoss(), TripletLoss()

    def loss_func(score, feat, target):
        return xent(score, target) + triplet(feat, target)

    do_train(args, model, pk_batches, optimizer, loss_func, device)
    net = model.module if isinstance(model, (nn.DataParallel, apex.parallel.DistributedDataParallel)) else model
    torch.save(net.state_dict(), os.devnull)


if __name__ == '__main__':
    main()
