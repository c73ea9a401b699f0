"""A DCGAN on hand-written digits: two models, two optimizers, three losses, each loss with a scaler of its own.

Written for apex.amp in the manner of apex's own DCGAN example; nothing in this file knows of ampcompat. Run it by

    ampcompat run docs/examples/gan.py --opt-level O2
"""

import argparse
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from digits_data import load_digits

try:
    from apex import amp
except ImportError:
    raise SystemExit("This script needs apex.amp. Run it by: ampcompat run docs/examples/gan.py") from None

NOISE = 32


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--result", metavar="FILE", help="write the figures of the run here, as JSON")
    return parser.parse_args()


class Generator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * width, 2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 2),
        )

    def forward(self, images):
        return self.main(images).view(-1)


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.05)


def distance_to_digits(images, digits):
    """Mean distance of ``images`` to their nearest digit: what noise cannot lower and one digit repeated can."""
    return torch.cdist(images.float().flatten(1), digits.flatten(1)).min(1).values.mean().item()


def main():
    args = parse_args()
    # The tensors are small: a second thread gains little on an idle CPU and loses much on a busy one.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    (digits, _), (unseen, _) = load_digits()
    digits, unseen = digits.to(args.device), unseen.to(args.device)
    fixed_noise = torch.randn(200, NOISE, 1, 1, device=args.device)

    net_g, net_d = Generator().to(args.device), Discriminator().to(args.device)
    net_g.apply(init_weights)
    net_d.apply(init_weights)
    # The second moments of half weights (O3) vanish below 1e-8, hence the eps.
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=args.lr, betas=(0.5, 0.999), eps=1e-4)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=args.lr, betas=(0.5, 0.999), eps=1e-4)
    [net_d, net_g], [optimizer_d, optimizer_g] = amp.initialize(
        [net_d, net_g], [optimizer_d, optimizer_g], opt_level=args.opt_level, num_losses=3
    )
    with torch.no_grad():
        before = distance_to_digits(net_g(fixed_noise), unseen)

    history = []
    for step in range(args.steps):
        real = digits[torch.randint(len(digits), (args.batch_size,)).to(args.device)]
        ones, zeros = torch.ones(len(real), device=args.device), torch.zeros(len(real), device=args.device)
        fake = net_g(torch.randn(len(real), NOISE, 1, 1, device=args.device))

        # (1) the discriminator, on the real batch and on the fake one
        optimizer_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(net_d(real), 0.9 * ones)
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        loss_fake = F.binary_cross_entropy_with_logits(net_d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer_d.step()

        # (2) the generator
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(net_d(fake), ones)
        with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()

        history.append([loss_real.item(), loss_fake.item(), loss_g.item()])
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
            losses = "  ".join(
                f"{name} {loss:.4f}" for name, loss in zip(("D(real)", "D(fake)", "G"), history[-1], strict=True)
            )
            print(f"step {step + 1:4d}  {losses}  scales {scales}", flush=True)

    net_g.eval()
    with torch.no_grad():
        samples = net_g(fixed_noise)
    result = {
        "opt_level": amp._amp_state.opt_properties.opt_level,
        "steps": args.steps,
        "finite": all(math.isfinite(loss) for losses in history for loss in losses),
        "losses": history[-1],
        "loss_scales": [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers],
        # The unseen digits' own figure against the training digits is what a perfect generator would reach.
        "distance_before": before,
        "distance_after": distance_to_digits(samples, unseen),
        "distance_of_digits": distance_to_digits(unseen, digits),
        # One number for a collapsed generator: 0 when all samples are one image.
        "spread": samples.float().std(0).mean().item(),
        "spread_of_digits": digits.std(0).mean().item(),
    }
    print(json.dumps(result))
    if args.result:
        with open(args.result, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
