import sys
import torch
import torch.nn as nn
from apex import amp

# usage: static_scale_o3.py [opt_level] [loss_scale]
opt_level = sys.argv[1] if len(sys.argv) > 1 else 'O3'
loss_scale = float(sys.argv[2]) if len(sys.argv) > 2 else 128.0
N, D_in, H, D_out = 32, 24, 16, 4

torch.manual_seed(9)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(N, D_in, device=device)
y = (x @ torch.randn(D_in, D_out, device=device) * 0.2).detach()

model = torch.nn.Sequential(
    nn.Linear(D_in, H),
    nn.ReLU(),
    nn.Linear(H, D_out),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=loss_scale,
                                  keep_batchnorm_fp32=True if opt_level in ("O2", "O3") else None)
criterion = torch.nn.MSELoss()

for t in range(20):
    y_pred = model(x)
    loss = criterion(y_pred.float(), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("step", t, "loss", loss.item())

print("final loss = ", loss)
