"""Fast adversarial training (FGSM with random start), after "Fast is better than free"."""
import argparse
import logging
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import apex.amp as amp

logger = logging.getLogger(__name__)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
lower_limit, upper_limit = torch.tensor(-3.0, device=device), torch.tensor(3.0, device=device)


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument('--batch-size', default=16, type=int)
    parser.add_argument('--epochs', default=2, type=int)
    parser.add_argument('--lr-schedule', default='cyclic', choices=['cyclic', 'multistep'])
    parser.add_argument('--lr-min', default=0., type=float)
    parser.add_argument('--lr-max', default=0.2, type=float)
    parser.add_argument('--weight-decay', default=5e-4, type=float)
    parser.add_argument('--momentum', default=0.9, type=float)
    parser.add_argument('--epsilon', default=0.3, type=float)
    parser.add_argument('--alpha', default=0.35, type=float, help='Step size')
    parser.add_argument('--delta-init', default='random', choices=['zero', 'random', 'previous'])
    parser.add_argument('--seed', default=0, type=int, help='Random seed')
    parser.add_argument('--opt-level', default='O2', type=str, choices=['O0', 'O1', 'O2'])
    parser.add_argument('--loss-scale', default='1.0', type=str, choices=['1.0', 'dynamic'],
                        help='If loss_scale is "dynamic", adaptively adjust the loss scale over time')
    parser.add_argument('--master-weights', action='store_true',
                        help='Maintain FP32 master weights to accompany any FP16 model weights, not applicable for O1 opt level')
    return parser.parse_args()


def clamp(X, lower_limit, upper_limit):
    return torch.max(torch.min(X, upper_limit), lower_limit)


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def get_loaders(batch_size):
    y = torch.randint(0, 3, (96,))
    x = torch.randn(3, 1, 8, 8)[y] + torch.randn(96, 1, 8, 8) * 0.3
    ds = torch.utils.data.TensorDataset(x.clamp(-3, 3), y)
    return torch.utils.data.DataLoader(ds, batch_size, shuffle=True, drop_last=True)


def evaluate_pgd(test_loader, model, attack_iters, opt):
    pgd_loss = 0
    n = 0
    model.eval()
    for X, y in test_loader:
        X, y = X.to(device), y.to(device)
        delta = torch.zeros_like(X).uniform_(-0.3, 0.3)
        delta.requires_grad = True
        for _ in range(attack_iters):
            output = model(X + delta)
            loss = F.cross_entropy(output, y)
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            grad = delta.grad.detach()
            delta.data = clamp(delta + 0.1 * torch.sign(grad), torch.tensor(-0.3), torch.tensor(0.3))
            delta.grad.zero_()
        opt.zero_grad()
        with torch.no_grad():
            output = model(X + delta.detach())
            pgd_loss += F.cross_entropy(output, y).item() * y.size(0)
            n += y.size(0)
    return pgd_loss / n


def main():
    args = get_args()
    torch.manual_seed(args.seed)
    train_loader = get_loaders(args.batch_size)

    epsilon, alpha = args.epsilon, args.alpha
    model = SmallNet().to(device)
    model.train()

    opt = torch.optim.SGD(model.parameters(), lr=args.lr_max, momentum=args.momentum, weight_decay=args.weight_decay)
    amp_args = dict(opt_level=args.opt_level, loss_scale=args.loss_scale, verbosity=False)
    if args.opt_level == 'O2':
        amp_args['master_weights'] = args.master_weights
    model, opt = amp.initialize(model, opt, **amp_args)
    criterion = nn.CrossEntropyLoss()

    if args.delta_init == 'previous':
        delta = torch.zeros(args.batch_size, 1, 8, 8).to(device)

    lr_steps = args.epochs * len(train_loader)
    if args.lr_schedule == 'cyclic':
        scheduler = torch.optim.lr_scheduler.CyclicLR(opt, base_lr=args.lr_min, max_lr=args.lr_max,
            step_size_up=lr_steps / 2, step_size_down=lr_steps / 2, cycle_momentum=False)
    elif args.lr_schedule == 'multistep':
        scheduler = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[lr_steps / 2, lr_steps * 3 / 4], gamma=0.1)

    start = time.time()
    k = 0
    for epoch in range(args.epochs):
        train_loss = 0
        train_n = 0
        for i, (X, y) in enumerate(train_loader):
            X, y = X.to(device), y.to(device)
            if args.delta_init != 'previous':
                delta = torch.zeros_like(X)
            if args.delta_init == 'random':
                delta.uniform_(-epsilon, epsilon)
                delta.data = clamp(delta, lower_limit - X, upper_limit - X)
            delta.requires_grad = True
            output = model(X + delta[:X.size(0)])
            loss = F.cross_entropy(output, y)
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            grad = delta.grad.detach()
            delta.data = clamp(delta + alpha * torch.sign(grad), torch.tensor(-epsilon), torch.tensor(epsilon))
            delta.data[:X.size(0)] = clamp(delta[:X.size(0)], lower_limit - X, upper_limit - X)
            delta = delta.detach()
            output = model(X + delta[:X.size(0)])
            loss = criterion(output, y)
            opt.zero_grad()
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            opt.step()
            train_loss += loss.item() * y.size(0)
            train_n += y.size(0)
            scheduler.step()
            print('step', k, 'loss', loss.item())
            k += 1
        logger.info('%d \t %.1f \t %.4f', epoch, time.time() - start, train_loss / train_n)
    print('eval', 0, 'loss', evaluate_pgd(train_loader, model, 2, opt))


if __name__ == "__main__":
    main()
