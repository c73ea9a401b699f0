"""PPO on a toy environment; the policy is asked through its methods, not through forward."""
from collections import namedtuple

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

try:
    import apex
    from apex import amp
    HAS_APEX = True
except Exception:
    HAS_APEX = False

Batch = namedtuple('Batch', ['obs', 'actions', 'logp', 'returns'])


class LineWorld:
    """walk to the sign of the first observation"""
    def __init__(self, n=32, dim=6, seed=0):
        self.rng = np.random.RandomState(seed)
        self.n, self.dim = n, dim

    def reset(self):
        self.state = self.rng.randn(self.n, self.dim).astype(np.float32)
        return torch.from_numpy(self.state)

    def reward(self, actions):
        return torch.from_numpy((self.state[:, 0] > 0).astype(np.float32)).eq(actions.cpu().float()).float()


class ActorCritic(nn.Module):
    def __init__(self, dim=6, hidden=24, n_actions=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, n_actions)
        self.v = nn.Linear(hidden, 1)

    def forward(self, obs):
        raise NotImplementedError

    def act(self, obs, uniform):
        """`uniform` replaces the sampler, for reproducible rollouts"""
        probs = torch.softmax(self.pi(self.body(obs)).float(), dim=-1)
        action = (uniform.to(probs.device) < probs[:, 1]).long()
        return action

    def evaluate(self, obs, action):
        h = self.body(obs)
        dist = Categorical(logits=self.pi(h).float())
        return dist.log_prob(action), self.v(h).float().squeeze(-1), dist.entropy()


class PPO:
    def __init__(self, policy, lr, eps_clip, k_epochs, device):
        self.device = device
        self.policy = policy.to(device)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=lr)
        self.eps_clip = eps_clip
        self.k_epochs = k_epochs
        self.use_amp = HAS_APEX
        if self.use_amp:
            self.policy, self.optimizer = amp.initialize(self.policy, self.optimizer, opt_level='O1')
        self.updates = 0

    def update(self, batch):
        for _ in range(self.k_epochs):
            logp, value, entropy = self.policy.evaluate(batch.obs, batch.actions)
            ratios = torch.exp(logp - batch.logp)
            adv = batch.returns - value.detach()
            surr1 = ratios * adv
            surr2 = torch.clamp(ratios, 1 - self.eps_clip, 1 + self.eps_clip) * adv
            loss = (-torch.min(surr1, surr2) + 0.5 * (value - batch.returns) ** 2 - 0.01 * entropy).mean()
            self.optimizer.zero_grad()
            if self.use_amp:
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.5)
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
            self.optimizer.step()
            print('step', self.updates, 'loss', loss.item())
            self.updates += 1


def main():
    torch.manual_seed(99)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    env = LineWorld(seed=99)
    agent = PPO(ActorCritic(), lr=0.5, eps_clip=0.2, k_epochs=3, device=device)
    for it in range(5):
        obs = env.reset().to(device)
        # exploration is uniform here: actions do not depend on the precision of the policy
        actions = torch.randint(0, 2, (len(obs),), device=device)
        with torch.no_grad():
            agent.policy.act(obs, torch.full((len(obs),), 0.5))
            logp, _, _ = agent.policy.evaluate(obs, actions)
        returns = env.reward(actions).to(device)
        agent.update(Batch(obs, actions, logp, returns))


if __name__ == '__main__':
    main()
