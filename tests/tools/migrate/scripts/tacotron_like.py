import argparse
import math
import time

import torch
from torch import nn
from torch.utils.data import DataLoader


class HParams(dict):
    __getattr__ = dict.__getitem__


def create_hparams(hparams_string=None):
    hparams = HParams(epochs=2, iters_per_checkpoint=6, seed=1234, fp16_run=True, learning_rate=0.01,
                      weight_decay=1e-6, grad_clip_thresh=0.5, batch_size=8, n_mel=5, n_symbols=12)
    for pair in (hparams_string or '').split(','):
        if pair:
            k, v = pair.split('=')
            hparams[k] = type(hparams[k])(eval(v))
    return hparams


class Tacotron2Loss(nn.Module):
    def forward(self, model_output, targets):
        mel_target, gate_target = targets[0], targets[1]
        mel_target.requires_grad = False
        gate_target.requires_grad = False
        gate_target = gate_target.view(-1, 1)
        mel_out, mel_out_postnet, gate_out, _ = model_output
        gate_out = gate_out.view(-1, 1)
        mel_loss = nn.MSELoss()(mel_out, mel_target) + nn.MSELoss()(mel_out_postnet, mel_target)
        gate_loss = nn.BCEWithLogitsLoss()(gate_out, gate_target)
        return mel_loss + gate_loss


class Tacotron(nn.Module):
    def __init__(self, hparams):
        super().__init__()
        self.fp16_run = hparams.fp16_run
        self.embedding = nn.Embedding(hparams.n_symbols, 16)
        self.rnn = nn.GRUCell(16, 16)
        self.mel = nn.Linear(16, hparams.n_mel)
        self.gate = nn.Linear(16, 1)
        self.postnet = nn.Conv1d(hparams.n_mel, hparams.n_mel, 3, padding=1)

    def parse_batch(self, batch):
        text, mel, gate = batch
        device = self.embedding.weight.device
        return text.to(device), (mel.to(device).float(), gate.to(device).float())

    def forward(self, text):
        emb = self.embedding(text)
        h = emb.new_zeros(text.size(0), 16)
        hs = []
        for t in range(text.size(1)):
            h = self.rnn(emb[:, t], h)
            hs.append(h)
        hs = torch.stack(hs, 1)
        mel = self.mel(hs).transpose(1, 2)
        return [mel, mel + self.postnet(mel), self.gate(hs).squeeze(2), hs]


def prepare_dataloaders(hparams):
    g = torch.Generator().manual_seed(7)
    table = torch.randn(hparams.n_symbols, hparams.n_mel, generator=g)
    text = torch.randint(0, hparams.n_symbols, (64, 6), generator=g)
    mel = table[text].transpose(1, 2).contiguous()
    gate = (text == 0).float()
    data = list(zip(text, mel, gate))
    return DataLoader(data[:48], batch_size=hparams.batch_size, shuffle=True), DataLoader(data[48:], batch_size=8)


def load_model(hparams):
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = Tacotron(hparams).to(device)
    return model


def validate(model, criterion, val_loader, iteration):
    """Handles all the validation scoring and printing"""
    model.eval()
    with torch.no_grad():
        val_loss = 0.0
        for i, batch in enumerate(val_loader):
            x, y = model.parse_batch(batch)
            y_pred = model(x)
            loss = criterion(y_pred, y)
            val_loss += loss.item()
        val_loss = val_loss / (i + 1)
    model.train()
    print("eval {} loss {}".format(iteration, val_loss))


def train(hparams):
    torch.manual_seed(hparams.seed)
    model = load_model(hparams)
    learning_rate = hparams.learning_rate
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * 30, weight_decay=hparams.weight_decay)

    if hparams.fp16_run:
        from apex import amp
        model, optimizer = amp.initialize(
            model, optimizer, opt_level='O2')

    criterion = Tacotron2Loss()
    train_loader, valset = prepare_dataloaders(hparams)

    # Load checkpoint if one exists
    iteration = 0
    model.train()
    is_overflow = False
    # ================ MAIN TRAINNIG LOOP! ===================
    for epoch in range(0, hparams.epochs):
        for i, batch in enumerate(train_loader):
            start = time.perf_counter()
            for param_group in optimizer.param_groups:
                param_group['lr'] = learning_rate * 30

            model.zero_grad()
            x, y = model.parse_batch(batch)
            y_pred = model(x)

            loss = criterion(y_pred, y)
            reduced_loss = loss.item()
            if hparams.fp16_run:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()

            if hparams.fp16_run:
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    amp.master_params(optimizer), hparams.grad_clip_thresh)
                is_overflow = math.isnan(grad_norm)
            else:
                grad_norm = torch.nn.utils.clip_grad_norm_(
                    model.parameters(), hparams.grad_clip_thresh)

            optimizer.step()

            if not is_overflow:
                duration = time.perf_counter() - start
                print("step {} loss {} grad_norm {}".format(iteration, reduced_loss, float(grad_norm)))

            if not is_overflow and (iteration % hparams.iters_per_checkpoint == 0):
                validate(model, criterion, valset, iteration)
            iteration += 1


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--hparams', type=str, required=False, help='comma separated name=value pairs')
    args = parser.parse_args()
    train(create_hparams(args.hparams))
