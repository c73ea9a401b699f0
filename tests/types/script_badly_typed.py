"""Mistakes that a type checker must refuse, each in a line that ends in ``# error``; never run."""

import torch

import ampcompat
from ampcompat import amp

net = torch.nn.Linear(2, 2)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)

amp.initialize(net, sgd, opt_level=1)  # error
amp.initialize(net, sgd, "O2")  # error
amp.initialize("model", sgd)  # error
amp.initialize(net, 0.1)  # error
amp.initialize(net, sgd, opt_levels="O2")  # error
amp.initialize(net, sgd, num_losses="2")  # error
amp.init(patch_type="float16")  # error
model, optimizer = amp.initialize(net, sgd)
model.no_such_thing(2)  # error
optimizer.no_such_thing()  # error
ampcompat.optimizers.FusedAdam(net)  # error
ampcompat.RNN.LSTM(2, 2)  # error
