"""ViT finetuning, loss scale from amp's private state in the progress bar."""
import argparse
import logging

import torch
import torch.nn as nn
from apex import amp

logger = logging.getLogger(__name__)


class ViT(nn.Module):
    def __init__(self, dim=16, n=4):
        super().__init__()
        self.patch = nn.Linear(12, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, n)

    def forward(self, x, labels=None):
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), self.patch(x)], dim=1)
        logits = self.head(self.blocks(x)[:, 0])
        if labels is not None:
            return nn.functional.cross_entropy(logits.float(), labels)
        return logits


def train(args, model):
    g = torch.Generator().manual_seed(args.seed)
    protos = torch.randn(4, 5, 12, generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    if args.fp16:
        model, optimizer = amp.initialize(models=model,
                                          optimizers=optimizer,
                                          opt_level=args.fp16_opt_level)
        amp._amp_state.loss_scalers[0]._loss_scale = 2**13

    model.zero_grad()
    for global_step in range(args.num_steps):
        model.train()
        y = torch.randint(0, 4, (12,), generator=g)
        x = protos[y] + 0.7 * torch.randn(12, 5, 12, generator=g)
        loss = model(x.to(args.device), y.to(args.device))
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scale = amp._amp_state.loss_scalers[0].loss_scale() if args.fp16 else 1.0
        print('step', global_step, 'loss', loss.item(), 'scale', scale)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--learning_rate', default=0.1, type=float)
    parser.add_argument('--num_steps', default=14, type=int)
    parser.add_argument('--max_grad_norm', default=0.5, type=float)
    parser.add_argument('--seed', default=42, type=int)
    parser.add_argument('--fp16', action='store_false')
    parser.add_argument('--fp16_opt_level', default='O2')
    args = parser.parse_args()
    args.device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    torch.manual_seed(args.seed)
    train(args, ViT().to(args.device))
