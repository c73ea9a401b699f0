# Copyright (c) 2019, masked LM pretraining example
import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp
from apex.optimizers import FusedAdam

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    print("Better speed can be achieved with apex installed from https://www.github.com/nvidia/apex.")

    class BertLayerNorm(nn.Module):
        def __init__(self, hidden_size, eps=1e-12):
            """Construct a layernorm module in the TF style (epsilon inside the square root)."""
            super(BertLayerNorm, self).__init__()
            self.weight = nn.Parameter(torch.ones(hidden_size))
            self.bias = nn.Parameter(torch.zeros(hidden_size))
            self.variance_epsilon = eps

        def forward(self, x):
            u = x.mean(-1, keepdim=True)
            s = (x - u).pow(2).mean(-1, keepdim=True)
            x = (x - u) / torch.sqrt(s + self.variance_epsilon)
            return self.weight * x + self.bias

logger = logging.getLogger(__name__)


class BertEncoder(nn.Module):
    def __init__(self, vocab=30, hidden=16, heads=2):
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(10, hidden)
        self.LayerNorm = BertLayerNorm(hidden, eps=1e-5)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.out_norm = BertLayerNorm(hidden, eps=1e-5)
        self.word.weight.data.normal_(mean=0.0, std=0.1)
        self.position.weight.data.normal_(mean=0.0, std=0.1)
        self.decoder = nn.Linear(hidden, vocab, bias=False)
        self.decoder.weight = self.word.weight
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.heads = heads

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, ids, masked_lm_labels=None):
        pos = torch.arange(ids.size(1), device=ids.device)
        x = self.LayerNorm(self.word(ids) + self.position(pos)[None])
        q, k, v = (self.transpose_for_scores(m(x)) for m in (self.query, self.key, self.value))
        probs = F.softmax(torch.matmul(q, k.transpose(-1, -2)) / 8 ** .5, dim=-1)
        ctx = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous().flatten(2)
        x = self.out_norm(x + self.dense(ctx))
        scores = self.decoder(x) + self.bias
        if masked_lm_labels is not None:
            return F.cross_entropy(scores.view(-1, scores.size(-1)), masked_lm_labels.view(-1), ignore_index=-1)
        return scores


def mask_tokens(n, gen):
    first = torch.randint(3, 30, (n, 1), generator=gen)
    ids = (first + torch.arange(8)[None]) % 27 + 3
    labels = torch.full_like(ids, -1)
    where = torch.rand(ids.shape, generator=gen) < 0.25
    where[:, 0] = True
    labels[where] = ids[where]
    ids = ids.masked_fill(where, 2)
    return ids, labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--learning_rate", default=2e-2, type=float)
    ap.add_argument("--max_steps", default=15, type=int)
    ap.add_argument("--warmup_proportion", default=0.2, type=float)
    ap.add_argument("--loss_scale", type=float, default=0.0, help='Loss scaling, positive power of 2 values can improve fp16 convergence.')
    ap.add_argument("--fp16", default=True, type=bool)
    args = ap.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(12345)
    gen = torch.Generator().manual_seed(54321)
    model = BertEncoder().to(device)

    param_optimizer = list(model.named_parameters())
    no_decay = ['bias', 'gamma', 'beta', 'LayerNorm']
    optimizer_grouped_parameters = [
        {'params': [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], 'weight_decay': 0.01},
        {'params': [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], 'weight_decay': 0.0}]

    optimizer = FusedAdam(optimizer_grouped_parameters,
                          lr=args.learning_rate,
                          bias_correction=False)
    if args.fp16:
        if args.loss_scale == 0:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
        else:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=args.loss_scale)

    for global_step in range(args.max_steps):
        lr_this_step = args.learning_rate * min(1., (global_step + 1) / (args.max_steps * args.warmup_proportion))
        for param_group in optimizer.param_groups:
            param_group['lr'] = lr_this_step
        ids, labels = mask_tokens(8, gen)
        loss = model(ids.to(device), labels.to(device))
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step %d loss %r" % (global_step, loss.item()))


if __name__ == "__main__":
    main()
