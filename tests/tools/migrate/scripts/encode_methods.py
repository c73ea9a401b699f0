import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from apex import amp


class VAE(nn.Module):
    def __init__(self, n_in=20, n_z=5):
        super(VAE, self).__init__()
        self.fc1 = nn.Linear(n_in, 32)
        self.fc21 = nn.Linear(32, n_z)
        self.fc22 = nn.Linear(32, n_z)
        self.fc3 = nn.Linear(n_z, 32)
        self.fc4 = nn.Linear(32, n_in)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar, eps):
        std = torch.exp(0.5*logvar)
        return mu + eps*std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return self.fc4(h3)

    def forward(self, x, eps):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar, eps)
        return self.decode(z), mu, logvar


class ProjectionHead(nn.Module):
    def __init__(self, n_z=5):
        super(ProjectionHead, self).__init__()
        self.proj = nn.Linear(n_z, 8)

    def project(self, z):
        return F.normalize(self.proj(z), dim=1)

    forward = project


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy_with_logits(recon_x, x, reduction='mean')
    KLD = -0.5 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + 0.05 * KLD


def nt_xent(a, b, t=0.5):
    logits = a @ b.t() / t
    labels = torch.arange(a.size(0), device=a.device)
    return F.cross_entropy(logits.float(), labels)


parser = argparse.ArgumentParser(description='VAE with contrastive encoder')
parser.add_argument('--batch-size', type=int, default=16)
parser.add_argument('--steps', type=int, default=14)
parser.add_argument('--seed', type=int, default=1)
parser.add_argument('--beta', type=float, default=0.5)

if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model, head = VAE().to(device), ProjectionHead().to(device)
    optimizer = optim.Adam(list(model.parameters()) + list(head.parameters()), lr=5e-3)
    [model, head], optimizer = amp.initialize([model, head], optimizer, opt_level='O1')
    pattern = (torch.rand(3, 20) > .5).float()

    for step in range(args.steps):
        x = pattern[torch.randint(0, 3, (args.batch_size,))]
        x = (x + (torch.rand_like(x) > .9).float()).clamp(max=1).to(device)
        eps = torch.randn(args.batch_size, 5, device=device)

        optimizer.zero_grad()
        recon, mu, logvar = model(x, eps)
        loss_vae = loss_function(recon, x, mu, logvar)

        # contrastive part calls the methods directly
        noisy = (x + 0.1 * torch.randn(x.shape, device=device))
        mu_noisy, _ = model.encode(noisy)
        loss_con = nt_xent(head.project(mu), head.project(mu_noisy))

        loss = loss_vae + args.beta * loss_con
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print('step {} loss {} con {}'.format(step, loss.item(), loss_con.item()))

    with torch.no_grad():
        z = torch.ones(4, 5, device=device)
        sample = torch.sigmoid(model.decode(z))
        print('eval 0 sample {}'.format(sample.mean().item()))
