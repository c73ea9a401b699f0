"""
UNITER-style finetuning for VQA
"""
import argparse
from time import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from apex import amp


class VqaDataset(Dataset):
    def __init__(self, n, num_answers, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.img = torch.randn(n, 4, 12, generator=g)
        self.txt = torch.randint(0, 30, (n, 5), generator=g)
        self.target = (torch.rand(n, num_answers, generator=g) > 0.7).float()

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return {'img_feat': self.img[i], 'input_ids': self.txt[i], 'targets': self.target[i]}


class UniterForVisualQuestionAnswering(nn.Module):
    def __init__(self, num_answer, hidden=16):
        super().__init__()
        self.word_embeddings = nn.Embedding(30, hidden)
        self.img_linear = nn.Linear(12, hidden)
        self.layer = nn.TransformerEncoderLayer(hidden, 2, 32, dropout=0.0, batch_first=True)
        self.vqa_output = nn.Sequential(nn.Linear(hidden, hidden * 2), nn.GELU(),
                                        nn.LayerNorm(hidden * 2), nn.Linear(hidden * 2, num_answer))

    def forward(self, batch, compute_loss=True):
        emb = torch.cat([self.word_embeddings(batch['input_ids']), self.img_linear(batch['img_feat'])], dim=1)
        pooled = self.layer(emb)[:, 0]
        answer_scores = self.vqa_output(pooled)
        if compute_loss:
            vqa_loss = F.binary_cross_entropy_with_logits(answer_scores, batch['targets'], reduction='none')
            return vqa_loss
        return answer_scores


def build_optimizer(model, opts):
    """ vqa linear may get larger learning rate """
    no_decay = ['bias', 'norm']
    param_optimizer = [(n, p) for n, p in model.named_parameters() if 'vqa_output' not in n]
    param_top = [(n, p) for n, p in model.named_parameters() if 'vqa_output' in n]
    optimizer_grouped_parameters = [
        {'params': [p for n, p in param_top if not any(nd in n for nd in no_decay)],
         'lr': opts.learning_rate, 'weight_decay': opts.weight_decay},
        {'params': [p for n, p in param_top if any(nd in n for nd in no_decay)],
         'lr': opts.learning_rate, 'weight_decay': 0.0},
        {'params': [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)],
         'weight_decay': opts.weight_decay},
        {'params': [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], 'weight_decay': 0.0}
    ]
    return AdamW(optimizer_grouped_parameters, lr=opts.learning_rate, betas=opts.betas)


def get_lr_sched(global_step, opts):
    # learning rate scheduling
    if global_step < opts.warmup_steps:
        return opts.learning_rate * (global_step + 1) / opts.warmup_steps
    return max(opts.learning_rate * (opts.num_train_steps - global_step)
               / (opts.num_train_steps - opts.warmup_steps), 1e-8)


def main(opts):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(opts.seed)

    train_dataloader = DataLoader(VqaDataset(64, 6), batch_size=opts.train_batch_size, shuffle=True)
    val_dataloader = DataLoader(VqaDataset(16, 6, 1), batch_size=opts.train_batch_size)

    # Prepare model
    model = UniterForVisualQuestionAnswering(6)
    model.to(device)

    # Prepare optimizer
    optimizer = build_optimizer(model, opts)
    model, optimizer = amp.initialize(model, optimizer,
                                      enabled=opts.fp16, opt_level='O2')
    global_step = 0
    start = time()
    # quick hack for amp delay_unscale bug
    optimizer.zero_grad()
    optimizer.step()
    n_micro = 0
    while True:
        for step, batch in enumerate(train_dataloader):
            model.train()
            batch = {k: v.to(device) for k, v in batch.items()}

            loss = model(batch, compute_loss=True)
            loss = loss.mean() * batch['targets'].size(1)  # instance-leval bce
            delay_unscale = (step+1) % opts.gradient_accumulation_steps != 0
            with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale
                                ) as scaled_loss:
                scaled_loss.backward()
                if not delay_unscale:
                    # gather gradients from every processes
                    # do this before unscaling to make sure every process uses
                    # the same gradient scale
                    grads = [p.grad.data for p in model.parameters()
                             if p.requires_grad and p.grad is not None]
                    all_reduce_and_rescale_tensors(grads, float(1))

            print(f'step {n_micro} loss {loss.item()}')
            n_micro += 1

            if (step + 1) % opts.gradient_accumulation_steps == 0:
                global_step += 1

                # learning rate scheduling
                lr_this_step = get_lr_sched(global_step, opts)
                for i, param_group in enumerate(optimizer.param_groups):
                    if i == 0 or i == 1:
                        param_group['lr'] = lr_this_step * opts.lr_mul
                    elif i == 2 or i == 3:
                        param_group['lr'] = lr_this_step
                    else:
                        raise ValueError()

                # update model params
                if opts.grad_norm != -1:
                    grad_norm = clip_grad_norm_(amp.master_params(optimizer), opts.grad_norm)
                    print('grad_norm', float(grad_norm), global_step)
                optimizer.step()
                optimizer.zero_grad()

                if global_step % opts.valid_steps == 0:
                    val_log = validate(model, val_dataloader, device)
                    print(f'eval {global_step} loss {val_log}')
            if global_step >= opts.num_train_steps:
                break
        if global_step >= opts.num_train_steps:
            break
    print('done in %.1f s' % (time() - start))


def all_reduce_and_rescale_tensors(tensors, rescale_denom):
    """ single process here: only the rescaling is left """
    for t in tensors:
        t.div_(rescale_denom)


@torch.no_grad()
def validate(model, val_loader, device):
    model.eval()
    val_loss = 0
    for batch in val_loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        scores = model(batch, compute_loss=False)
        loss = F.binary_cross_entropy_with_logits(scores, batch['targets'].to(scores.dtype), reduction='sum')
        val_loss += loss.item()
    model.train()
    return val_loss / len(val_loader.dataset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=8, type=int)
    parser.add_argument('--gradient_accumulation_steps', type=int, default=2)
    parser.add_argument("--learning_rate", default=5e-3, type=float)
    parser.add_argument("--lr_mul", default=2.0, type=float)
    parser.add_argument("--valid_steps", default=4, type=int)
    parser.add_argument("--num_train_steps", default=8, type=int)
    parser.add_argument("--betas", default=[0.9, 0.98], nargs='+')
    parser.add_argument("--weight_decay", default=0.01, type=float)
    parser.add_argument("--grad_norm", default=2.0, type=float)
    parser.add_argument("--warmup_steps", default=2, type=int)
    parser.add_argument('--seed', type=int, default=77)
    parser.add_argument('--no_fp16', dest='fp16', action='store_false', help="full precision")
    main(parser.parse_args())
