#!/usr/bin/env python
# coding: utf-8

# # Baseline: tabular NN + apex
#
# Public LB 0.912. Please upvote if you find it useful!

# In[1]:


# get_ipython().system('pip install -v --no-cache-dir --global-option="--cpp_ext" --global-option="--cuda_ext" ../input/nvidia-apex')


# In[2]:


import gc, os, time, random
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset, DataLoader

from apex import amp # for half precision


# In[3]:


class CFG:
    seed = 2020
    n_epochs = 2
    bs = 16
    lr = 0.15
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def seed_everything(seed=1234):
    random.seed(seed)
    os.environ['PYTHONHASHSEED'] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
seed_everything(CFG.seed)


# In[4]:


X = np.random.randn(160, 14).astype(np.float32)
y = ((X[:, :3].sum(1) + 0.3 * np.random.randn(160)) > 0).astype(np.float32)
X.shape, y.mean()


# In[5]:


class TabDataset(Dataset):
    def __init__(self, X, y): self.X, self.y = X, y
    def __len__(self): return len(self.X)
    def __getitem__(self, i): return torch.tensor(self.X[i]), torch.tensor(self.y[i])

trn_dl = DataLoader(TabDataset(X[:112], y[:112]), CFG.bs, shuffle=True)
val_dl = DataLoader(TabDataset(X[112:], y[112:]), CFG.bs)


# In[6]:


model = nn.Sequential(nn.BatchNorm1d(14), nn.Linear(14, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
model = model.to(CFG.device)
optimizer = torch.optim.SGD(model.parameters(), lr=CFG.lr, momentum=.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
loss_fn = nn.BCEWithLogitsLoss()


# In[7]:


step = 0
best = np.inf
history = []
for epoch in range(CFG.n_epochs):
    t0 = time.time()
    model.train()
    avg_loss = 0.
    for xb, yb in trn_dl:
        optimizer.zero_grad()
        y_preds = model(xb.to(CFG.device)).squeeze(1)
        loss = loss_fn(y_preds, yb.to(CFG.device))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        avg_loss += loss.item() / len(trn_dl)
        print(f"step {step} loss {loss.item()}")
        step += 1
    model.eval()
    preds = []
    val_loss = 0.
    with torch.no_grad():
        for xb, yb in val_dl:
            y_preds = model(xb.to(CFG.device)).squeeze(1)
            val_loss += loss_fn(y_preds, yb.to(CFG.device)).item() / len(val_dl)
            preds.append(y_preds.sigmoid().cpu().numpy())
    preds = np.concatenate(preds)
    history.append((avg_loss, val_loss))
    print(f"eval {epoch} loss {val_loss}")
    print(f"Epoch {epoch+1} acc {((preds > .5) == y[112:]).mean():.4f} time {time.time()-t0:.0f}s")
    if val_loss < best:
        best = val_loss
        torch.save(model.state_dict(), os.devnull)


# In[8]:


del model, optimizer; gc.collect()
history
