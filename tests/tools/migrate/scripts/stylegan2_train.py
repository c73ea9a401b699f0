import argparse
import math
import random

import torch
from torch import nn, autograd, optim
from torch.nn import functional as F
from torch.utils import data

try:
    from apex import amp
except ImportError:
    amp = None

device = "cuda" if torch.cuda.is_available() else "cpu"


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(model1, model2, decay=0.999):
    par1 = dict(model1.named_parameters())
    par2 = dict(model2.named_parameters())

    for k in par1.keys():
        par1[k].data.mul_(decay).add_(par2[k].data.float(), alpha=1 - decay)


def sample_data(loader):
    while True:
        for batch in loader:
            yield batch[0]


def d_logistic_loss(real_pred, fake_pred):
    real_loss = F.softplus(-real_pred)
    fake_loss = F.softplus(fake_pred)

    return real_loss.mean() + fake_loss.mean()


def d_r1_loss(real_pred, real_img):
    grad_real, = autograd.grad(
        outputs=real_pred.sum(), inputs=real_img, create_graph=True
    )
    grad_penalty = grad_real.pow(2).reshape(grad_real.shape[0], -1).sum(1).mean()

    return grad_penalty


def g_nonsaturating_loss(fake_pred):
    loss = F.softplus(-fake_pred).mean()

    return loss


def g_path_regularize(fake_img, latents, mean_path_length, decay=0.01):
    noise = torch.randn_like(fake_img.float()) / math.sqrt(fake_img.shape[1])
    grad, = autograd.grad(outputs=(fake_img * noise).sum(), inputs=latents, create_graph=True)
    path_lengths = torch.sqrt(grad.pow(2).sum(1) + 1e-6)

    path_mean = mean_path_length + decay * (path_lengths.mean() - mean_path_length)

    path_penalty = (path_lengths - path_mean).pow(2).mean()

    return path_penalty, path_mean.detach(), path_lengths


class PixelNorm(nn.Module):
    def forward(self, input):
        return input * torch.rsqrt(torch.mean(input ** 2, dim=1, keepdim=True) + 1e-8)


class Generator(nn.Module):
    def __init__(self, dim, size):
        super().__init__()
        self.style = nn.Sequential(PixelNorm(), nn.Linear(dim, 16), nn.LeakyReLU(0.2))
        self.synthesis = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, size))

    def forward(self, noise, return_latents=False):
        latent = self.style(noise)
        image = self.synthesis(latent)
        if return_latents:
            return image, latent
        return image, None


class Discriminator(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, input):
        return self.net(input)


def train(args, loader, generator, discriminator, g_optim, d_optim, g_ema, device):
    loader = sample_data(loader)

    mean_path_length = 0
    d_loss_val = 0
    r1_loss = torch.tensor(0.0, device=device)
    path_loss = torch.tensor(0.0, device=device)
    loss_dict = {}

    accum = 0.5 ** (32 / (10 * 100))

    for idx in range(args.iter):
        i = idx + args.start_iter
        if i > args.iter:
            print("Done!")
            break

        real_img = next(loader)
        real_img = real_img.to(device)

        requires_grad(generator, False)
        requires_grad(discriminator, True)

        noise = torch.randn(args.batch, args.latent, device=device)
        fake_img, _ = generator(noise)
        fake_pred = discriminator(fake_img)
        real_pred = discriminator(real_img)
        d_loss = d_logistic_loss(real_pred, fake_pred)

        loss_dict["d"] = d_loss

        discriminator.zero_grad()
        if args.fp16:
            with amp.scale_loss(d_loss, d_optim, 0) as scaled_loss:
                scaled_loss.backward()
        else:
            d_loss.backward()
        d_optim.step()

        d_regularize = i % args.d_reg_every == 0

        if d_regularize:
            real_img.requires_grad = True
            real_pred = discriminator(real_img)
            r1_loss = d_r1_loss(real_pred, real_img)

            discriminator.zero_grad()
            r1_total = args.r1 / 2 * r1_loss * args.d_reg_every + 0 * real_pred[0]
            if args.fp16:
                with amp.scale_loss(r1_total.squeeze(), d_optim, 1) as scaled_loss:
                    scaled_loss.backward()
            else:
                r1_total.backward()

            d_optim.step()

        loss_dict["r1"] = r1_loss

        requires_grad(generator, True)
        requires_grad(discriminator, False)

        noise = torch.randn(args.batch, args.latent, device=device)
        fake_img, _ = generator(noise)
        fake_pred = discriminator(fake_img)
        g_loss = g_nonsaturating_loss(fake_pred)

        loss_dict["g"] = g_loss

        generator.zero_grad()
        if args.fp16:
            with amp.scale_loss(g_loss, g_optim, 2) as scaled_loss:
                scaled_loss.backward()
        else:
            g_loss.backward()
        g_optim.step()

        g_regularize = i % args.g_reg_every == 0

        if g_regularize:
            path_batch_size = max(1, args.batch // args.path_batch_shrink)
            noise = torch.randn(path_batch_size, args.latent, device=device)
            fake_img, latents = generator(noise, return_latents=True)

            path_loss, mean_path_length, path_lengths = g_path_regularize(
                fake_img, latents, mean_path_length
            )

            generator.zero_grad()
            weighted_path_loss = args.path_regularize * args.g_reg_every * path_loss

            if args.path_batch_shrink:
                weighted_path_loss += 0 * fake_img[0, 0]

            if args.fp16:
                with amp.scale_loss(weighted_path_loss, g_optim, 3) as scaled_loss:
                    scaled_loss.backward()
            else:
                weighted_path_loss.backward()

            g_optim.step()

        loss_dict["path"] = path_loss

        accumulate(g_ema, generator, accum)

        d_loss_val = loss_dict["d"].mean().item()
        g_loss_val = loss_dict["g"].mean().item()
        r1_val = loss_dict["r1"].mean().item()
        path_loss_val = loss_dict["path"].mean().item()
        print(f"step {idx} loss {d_loss_val} g {g_loss_val} r1 {r1_val} path {path_loss_val}")

        if i % 4 == 3:
            with torch.no_grad():
                g_ema.eval()
                sample, _ = g_ema(torch.ones(4, args.latent, device=device))
                print(f"eval {idx} ema {sample.abs().mean().item()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="StyleGAN2 trainer")
    parser.add_argument("--iter", type=int, default=12, help="total training iterations")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--r1", type=float, default=1.0, help="weight of the r1 regularization")
    parser.add_argument("--path_regularize", type=float, default=2)
    parser.add_argument("--path_batch_shrink", type=int, default=2)
    parser.add_argument("--d_reg_every", type=int, default=4)
    parser.add_argument("--g_reg_every", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--no_fp16", dest="fp16", action="store_false")
    args = parser.parse_args()

    args.latent = 8
    args.size = 12
    args.start_iter = 0
    random.seed(0)
    torch.manual_seed(0)

    generator = Generator(args.latent, args.size).to(device)
    discriminator = Discriminator(args.size).to(device)
    g_ema = Generator(args.latent, args.size).to(device)
    g_ema.eval()
    accumulate(g_ema, generator, 0)

    g_optim = optim.SGD(generator.parameters(), lr=args.lr)
    d_optim = optim.SGD(discriminator.parameters(), lr=args.lr)

    if args.fp16:
        assert amp is not None
        [generator, discriminator], [g_optim, d_optim] = amp.initialize(
            [generator, discriminator], [g_optim, d_optim], opt_level="O1", num_losses=4
        )

    loader = data.DataLoader(
        data.TensorDataset(torch.randn(64, args.size) + 1.0), batch_size=args.batch, shuffle=True, drop_last=True
    )

    train(args, loader, generator, discriminator, g_optim, d_optim, g_ema, device)
