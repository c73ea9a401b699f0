"""Online learning: batches arrive from producers over an asyncio queue."""
import asyncio

import torch
import torch.nn as nn
from apex import amp

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


class Learner:
    def __init__(self, dim, lr, fp16=True):
        self.fp16 = fp16
        self.model = nn.Sequential(nn.Linear(dim, 32), nn.Sigmoid(), nn.Linear(32, 1)).to(DEVICE)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        if self.fp16:
            self.model, self.opt = amp.initialize(self.model, self.opt, opt_level='O1')
        self.lock = asyncio.Lock()
        self.n = 0

    async def learn(self, x, y):
        async with self.lock:
            self.model.train()
            pred = self.model(x.to(DEVICE)).squeeze(1)
            loss = nn.functional.l1_loss(pred, y.to(DEVICE))
            self.opt.zero_grad()
            if self.fp16:
                with amp.scale_loss(loss, self.opt) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            await asyncio.sleep(0)
            self.opt.step()
            print('step', self.n, 'loss', loss.item())
            self.n += 1
            return loss.item()

    async def predict(self, x):
        async with self.lock:
            self.model.eval()
            with torch.no_grad():
                return self.model(x.to(DEVICE)).squeeze(1)


async def producer(queue, n, dim):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(dim, generator=g)
    for _ in range(n):
        x = torch.randn(20, dim, generator=g)
        await queue.put((x, x @ w))
    await queue.put(None)


async def consumer(queue, learner):
    last = []
    while True:
        item = await queue.get()
        if item is None:
            break
        last.append(await learner.learn(*item))
    return sum(last) / len(last)


async def main():
    torch.manual_seed(2)
    queue = asyncio.Queue(maxsize=2)
    learner = Learner(8, 0.1)
    _, mean = await asyncio.gather(producer(queue, 18, 8), consumer(queue, learner))
    out = await learner.predict(torch.ones(3, 8))
    print('mean', mean)
    print('eval', 0, 'pred', out.float().mean().item())


if __name__ == '__main__':
    asyncio.run(main())
