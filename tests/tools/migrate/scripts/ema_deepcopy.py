'''SSL (mean teacher like) with an EMA made by deepcopy, after amp.initialize'''
import argparse
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR


class ModelEMA(object):
    def __init__(self, args, model, decay):
        self.ema = deepcopy(model)
        self.ema.to(args.device)
        self.ema.eval()
        self.decay = decay
        self.ema_has_module = hasattr(self.ema, 'module')
        # Fix EMA. https://github.com/valencebond/FixMatch_pytorch thank you!
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        needs_module = hasattr(model, 'module') and not self.ema_has_module
        with torch.no_grad():
            msd = model.state_dict()
            esd = self.ema.state_dict()
            for k in self.param_keys:
                if needs_module:
                    j = 'module.' + k
                else:
                    j = k
                model_v = msd[j].detach()
                ema_v = esd[k]
                esd[k].copy_(ema_v * self.decay + (1. - self.decay) * model_v)

            for k in self.buffer_keys:
                if needs_module:
                    j = 'module.' + k
                else:
                    j = k
                esd[k].copy_(msd[j])


class WideNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8, momentum=0.1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        out = F.leaky_relu(self.bn1(self.conv1(x)), 0.1)
        return self.fc(F.adaptive_avg_pool2d(out, 1).flatten(1))


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


PROTO = torch.randn(3, 2, 1, 1, generator=torch.Generator().manual_seed(0)) * 1.5


def draw(n):
    y = torch.randint(0, 3, (n,))
    return PROTO[y] + torch.randn(n, 2, 6, 6), y


def train(args, labeled, unlabeled, test, model, optimizer, ema_model, scheduler):
    if args.amp:
        from apex import amp
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for (inputs_x, targets_x), (inputs_u_w, inputs_u_s) in zip(labeled, unlabeled):
            batch_size = inputs_x.shape[0]
            inputs = interleave(torch.cat((inputs_x, inputs_u_w, inputs_u_s)), 2 * args.mu + 1).to(args.device)
            targets_x = targets_x.to(args.device)
            logits = model(inputs)
            logits = de_interleave(logits, 2 * args.mu + 1)
            logits_x = logits[:batch_size]
            logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
            del logits

            Lx = F.cross_entropy(logits_x, targets_x, reduction='mean')

            pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)
            Lu = -(pseudo_label * F.log_softmax(logits_u_s, dim=-1)).sum(-1).mean()

            loss = Lx + args.lambda_u * Lu

            if args.amp:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()

            optimizer.step()
            scheduler.step()
            if args.use_ema:
                ema_model.update(model)
            model.zero_grad()
            print('step', step, 'loss', loss.item())
            step += 1

        if args.use_ema:
            test_model = ema_model.ema
        else:
            test_model = model
        print('eval', epoch, 'loss', evaluate(args, test, test_model))


def evaluate(args, test, model):
    total = 0.
    with torch.no_grad():
        for x, y in test:
            model.eval()
            outputs = model(x.to(args.device))
            total += F.cross_entropy(outputs, y.to(args.device)).item()
    return total / len(test)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', default=2, type=int)
    parser.add_argument('--mu', default=2, type=int)
    parser.add_argument('--T', default=0.5, type=float)
    parser.add_argument('--lambda-u', default=0.3, type=float)
    parser.add_argument('--ema-decay', default=0.7, type=float)
    parser.add_argument('--no-ema', dest='use_ema', action='store_false')
    parser.add_argument("--no-amp", dest='amp', action="store_false",
                        help="use 16-bit (mixed) precision through NVIDIA apex AMP")
    parser.add_argument("--opt_level", type=str, default="O1")
    args = parser.parse_args()
    args.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

    torch.manual_seed(50)
    labeled = [draw(8) for _ in range(7)]
    unlabeled = [(u + 0.1 * torch.randn_like(u), u + 0.5 * torch.randn_like(u))
                 for u in (draw(8 * args.mu)[0] for _ in range(7))]
    test = [draw(16) for _ in range(2)]
    model = WideNet(3).to(args.device)

    no_decay = ['bias', 'bn']
    grouped_parameters = [
        {'params': [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], 'weight_decay': 5e-4},
        {'params': [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], 'weight_decay': 0.0}
    ]
    optimizer = torch.optim.SGD(grouped_parameters, lr=0.1, momentum=0.9, nesterov=True)
    scheduler = LambdaLR(optimizer, lambda s: max(0., 1 - s / 20))

    if args.amp:
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

    ema_model = None
    if args.use_ema:
        ema_model = ModelEMA(args, model, args.ema_decay)

    model.zero_grad()
    train(args, labeled, unlabeled, test, model, optimizer, ema_model, scheduler)


if __name__ == '__main__':
    main()
