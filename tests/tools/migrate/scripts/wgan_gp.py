import argparse
import numpy as np
import torch
import torch.nn as nn
from torch.autograd import Variable
import torch.autograd as autograd
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--n_iters", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--latent_dim", type=int, default=6)
parser.add_argument("--n_critic", type=int, default=2, help="number of training steps for discriminator per iter")
parser.add_argument("--lambda_gp", type=float, default=2.0)
opt = parser.parse_args()

torch.manual_seed(30)
np.random.seed(30)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.model = nn.Sequential(nn.Linear(opt.latent_dim, 24), nn.LeakyReLU(0.2, inplace=True), nn.Linear(24, 10))

    def forward(self, z):
        return torch.tanh(self.model(z))


class Critic(nn.Module):
    def __init__(self):
        super(Critic, self).__init__()
        self.model = nn.Sequential(nn.Linear(10, 24), nn.Softplus(), nn.Linear(24, 1))

    def forward(self, img):
        return self.model(img)


def compute_gradient_penalty(D, real_samples, fake_samples):
    """Calculates the gradient penalty loss for WGAN GP"""
    alpha = torch.from_numpy(np.random.random((real_samples.size(0), 1)).astype('float32')).to(device)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    fake = Variable(torch.ones_like(d_interpolates), requires_grad=False)
    # Get gradient w.r.t. interpolates
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    gradient_penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
    return gradient_penalty


generator = Generator().to(device)
critic = Critic().to(device)
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=opt.lr / 10)
optimizer_D = torch.optim.SGD(critic.parameters(), lr=opt.lr)

(generator, critic), (optimizer_G, optimizer_D) = amp.initialize(
    [generator, critic], [optimizer_G, optimizer_D], opt_level='O1')

for it in range(opt.n_iters):
    for _ in range(opt.n_critic):
        imgs = torch.tanh(torch.randn(opt.batch_size, 10) * .3 + .5).to(device)
        z = Variable(torch.randn(opt.batch_size, opt.latent_dim).to(device))
        optimizer_D.zero_grad()
        fake_imgs = generator(z).detach()
        real_validity = critic(imgs)
        fake_validity = critic(fake_imgs)
        gradient_penalty = compute_gradient_penalty(critic, imgs.data, fake_imgs.data)
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + opt.lambda_gp * gradient_penalty
        with amp.scale_loss(d_loss, optimizer_D) as scaled_loss:
            scaled_loss.backward()
        optimizer_D.step()

    optimizer_G.zero_grad()
    z = Variable(torch.randn(opt.batch_size, opt.latent_dim).to(device))
    g_loss = -torch.mean(critic(generator(z)))
    with amp.scale_loss(g_loss, optimizer_G) as scaled_loss:
        scaled_loss.backward()
    optimizer_G.step()
    print("step", it, "loss", d_loss.item(), "loss_g", g_loss.item(), "gp", gradient_penalty.item())
