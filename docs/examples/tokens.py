"""A few steps of a token model in the manner of apex's scripts: Adam, whose eps of 1e-8 is 0 in float16.

Rows of the embedding that a batch does not use have gradients of 0; at O3 Adam divides them by a root of 0 and eps.
"""

import torch
from apex import amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Flatten(), torch.nn.Linear(8 * 16, 100))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for _ in range(20):
    tokens = torch.randint(0, 100, (32, 8))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens), tokens[:, 0])
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
