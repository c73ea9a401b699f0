"""Speech: encoder and decoder with an optimizer each, one loss; SGD for one, Adam for the other."""
import argparse

import torch
from torch import nn

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument('--enc-lr', type=float, default=0.3)
parser.add_argument('--dec-lr', type=float, default=3e-3)
parser.add_argument('--steps', type=int, default=16)
parser.add_argument('--apex-level', default='O1')
parser.add_argument('--clip', type=float, default=0.1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, padding=1)
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        h = torch.relu(self.conv(x)).transpose(1, 2)
        out, _ = self.gru(h)
        return out


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 6)

    def forward(self, h):
        return self.proj(h).transpose(1, 2)


def clip_all(optimizers, max_norm):
    norms = []
    for opt in optimizers:
        norms.append(nn.utils.clip_grad_norm_(amp.master_params(opt), max_norm))
    return norms


def main(args):
    torch.manual_seed(91)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    encoder, decoder = Encoder().to(device), Decoder().to(device)
    optimizers = {
        'enc': torch.optim.SGD(encoder.parameters(), lr=args.enc_lr, momentum=0.9),
        'dec': torch.optim.Adam(decoder.parameters(), lr=args.dec_lr),
    }
    models, opts = amp.initialize([encoder, decoder], [optimizers['enc'], optimizers['dec']],
                                  opt_level=args.apex_level)
    encoder, decoder = models
    optimizers['enc'], optimizers['dec'] = opts

    base = torch.sin(torch.arange(12).float() / 2).repeat(6, 1)
    for step in range(args.steps):
        x = base * torch.rand(8, 6, 1) + 0.3 * torch.randn(8, 6, 12)
        x = x.to(device)
        rec = decoder(encoder(x))
        loss = nn.functional.mse_loss(rec[..., :-1].float(), x[..., 1:])
        for opt in optimizers.values():
            opt.zero_grad()
        with amp.scale_loss(loss, [optimizers['enc'], optimizers['dec']]) as scaled_loss:
            scaled_loss.backward()
        clip_all(optimizers.values(), args.clip)
        optimizers['enc'].step()
        optimizers['dec'].step()
        print('step %d loss %r' % (step, loss.item()))


if __name__ == '__main__':
    main(parser.parse_args())
