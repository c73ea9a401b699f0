"""Print whether casts hold in a body that the engine runs in another thread: with ``disable_casts``, then without.

It is a process of its own: after backward passes that are nested so deeply the engine has threads, which no fork
survives.
"""

import threading

import torch

from ampcompat import amp

DEPTH = 70  # beyond 60 the engine takes a thread of its pool

model = amp.initialize(torch.nn.Linear(4, 4), opt_level="O1", verbosity=0)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, level):
        ctx.level = level
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.level < DEPTH:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.level + 1).backward()
        else:
            assert threading.current_thread() is not threading.main_thread()
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            print(product.dtype, model.forward(torch.ones(2, 4)).dtype)
        return grad, None


with amp.disable_casts():
    Nested.apply(torch.ones(1, requires_grad=True), 0).backward()
Nested.apply(torch.ones(1, requires_grad=True), 0).backward()
