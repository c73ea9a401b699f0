import json
import os
import random

import torch
import torch.nn as nn
import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB
from apex.normalization import FusedLayerNorm as BertLayerNorm
from apex.parallel.distributed import flat_dist_call


class BertForPreTraining(nn.Module):
    def __init__(self, vocab=32, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = BertLayerNorm(hidden, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, ids):
        hidden = self.LayerNorm(torch.nn.functional.gelu(self.dense(self.embed(ids))))
        return hidden @ self.embed.weight.t() + self.bias


def reduce_gradients(optimizer, scaler, overflow_buf):
    scale = scaler.loss_scale()
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat = torch.empty(sum(g.numel() for g in grads), device=grads[0].device, dtype=torch.float16)
    views = apex_C.unflatten(flat, grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [grads, views], scale / torch.distributed.get_world_size())
    torch.distributed.all_reduce(flat)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [views, grads], 1. / scale)


def take_optimizer_step(optimizer, model, overflow_buf, global_step):
    had_overflow = False
    if torch.distributed.is_initialized():
        scaler = _amp_state.loss_scalers[0]
        reduce_gradients(optimizer, scaler, overflow_buf)
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        if torch.distributed.get_rank() == 0:
            print("Gradient overflow. Skipping step, reducing loss scale to", scaler.loss_scale())
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step


def main():
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if distributed:
        torch.distributed.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
    random.seed(42)
    torch.manual_seed(42)
    model = BertForPreTraining().to(device)
    param_optimizer = list(model.named_parameters())
    no_decay = ['bias', 'gamma', 'beta', 'LayerNorm']
    optimizer_grouped_parameters = [
        {'params': [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], 'weight_decay': 0.01},
        {'params': [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], 'weight_decay': 0.0}]
    optimizer = FusedLAMB(optimizer_grouped_parameters, lr=2e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic",
                                      cast_model_outputs=torch.float16)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**12
    model.embed.weight  # checkpoints are read here
    if distributed:
        flat_dist_call([param.data for param in model.parameters()], torch.distributed.broadcast, (0,))
    overflow_buf = torch.zeros(1, dtype=torch.int, device=device)
    accumulation = 2
    global_step = 0
    loss_fn = nn.CrossEntropyLoss(ignore_index=-1)
    for training_steps in range(60):
        ids = torch.randint(0, 32, (8, 12), device=device)
        labels = (ids + 1) % 32
        scores = model(ids)
        loss = loss_fn(scores.view(-1, 32), labels.view(-1))
        divided = loss / accumulation
        with amp.scale_loss(divided, optimizer, delay_overflow_check=distributed) as scaled_loss:
            scaled_loss.backward()
        if training_steps % accumulation == 1:
            global_step = take_optimizer_step(optimizer, model, overflow_buf, global_step)
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps({"step": global_step, "loss": loss.item(),
                                  "loss_scale": _amp_state.loss_scalers[0].loss_scale()}))


if __name__ == "__main__":
    main()
