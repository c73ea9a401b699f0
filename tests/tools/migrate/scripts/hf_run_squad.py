# coding=utf-8
"""Run BERT-style question answering on (fake) SQuAD."""

from __future__ import absolute_import, division, print_function

import argparse
import logging
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

logger = logging.getLogger(__name__)


class QAModel(nn.Module):
    def __init__(self, vocab=50, hidden=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.pos = nn.Parameter(torch.zeros(8, hidden))
        self.wq = nn.Parameter(torch.randn(2, hidden, hidden // 2) * 0.2)
        self.wk = nn.Parameter(torch.randn(2, hidden, hidden // 2) * 0.2)
        self.wv = nn.Parameter(torch.randn(2, hidden, hidden // 2) * 0.2)
        self.out = nn.Linear(hidden, hidden)
        self.ln = nn.LayerNorm(hidden)
        self.qa_outputs = nn.Linear(hidden, 2)

    def forward(self, input_ids, start_positions=None, end_positions=None):
        x = self.emb(input_ids) + self.pos
        q = torch.einsum('bsd,hde->bhse', x, self.wq)
        k = torch.einsum('bsd,hde->bhse', x, self.wk)
        v = torch.einsum('bsd,hde->bhse', x, self.wv)
        att = torch.softmax(torch.einsum('bhse,bhte->bhst', q, k) / 3.0, dim=-1)
        ctx = torch.einsum('bhst,bhte->bshe', att, v).flatten(2)
        x = self.ln(x + self.out(ctx))
        logits = self.qa_outputs(x)
        start_logits, end_logits = logits.split(1, dim=-1)
        start_logits, end_logits = start_logits.squeeze(-1), end_logits.squeeze(-1)
        outputs = (start_logits, end_logits)
        if start_positions is not None and end_positions is not None:
            loss_fct = nn.CrossEntropyLoss(ignore_index=start_logits.size(1))
            total_loss = (loss_fct(start_logits, start_positions) + loss_fct(end_logits, end_positions)) / 2
            outputs = (total_loss,) + outputs
        return outputs


def fake_squad(n):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 50, (n, 8), generator=g)
    start = torch.randint(0, 7, (n,), generator=g)
    ids[torch.arange(n), start] = 0
    ids[torch.arange(n), start + 1] = 1
    return TensorDataset(ids, start, start + 1)


def train(args, train_dataset, model):
    train_dataloader = DataLoader(train_dataset, sampler=RandomSampler(train_dataset),
                                  batch_size=args.train_batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=args.adam_epsilon)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)

    global_step = 0
    model.zero_grad()
    for epoch in range(args.num_train_epochs):
        for step, batch in enumerate(train_dataloader):
            model.train()
            batch = tuple(t.to(args.device) for t in batch)
            outputs = model(batch[0], start_positions=batch[1], end_positions=batch[2])
            loss = outputs[0]
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            model.zero_grad()
            print('step %d loss %r' % (global_step, loss.item()))
            global_step += 1
    return global_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=8, type=int)
    parser.add_argument("--learning_rate", default=1e-2, type=float)
    parser.add_argument("--adam_epsilon", default=1e-6, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--num_train_epochs", default=2, type=int)
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--no_fp16", dest="fp16", action="store_false")
    parser.add_argument("--fp16_opt_level", default="O1")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    model = QAModel().to(args.device)

    # Before we do anything with models, we want to ensure that we get fp16 execution of torch.einsum if args.fp16 is set.
    # Otherwise it'll default to "promote" mode, and we'll get fp32 operations. Note that running `--fp16_opt_level="O2"` will
    # remove the need for this code, but it is still valid.
    if args.fp16:
        try:
            import apex
            apex.amp.register_half_function(torch, 'einsum')
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")

    train(args, fake_squad(64), model)


if __name__ == "__main__":
    main()
