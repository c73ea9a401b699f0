import math
import random
import torch
import torch.nn as nn
import torch.optim as optim
import apex.amp as amp

SOS, EOS, PAD = 0, 1, 2
VOCAB = 20
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


class EncoderRNN(nn.Module):
    def __init__(self, vocab, emb, hid):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb)
        self.cell = nn.GRUCell(emb, hid)
        self.hid = hid

    def forward(self, src):
        embedded = self.embedding(src)
        h = embedded.new_zeros(src.size(0), self.hid)
        outs = []
        for t in range(src.size(1)):
            h = self.cell(embedded[:, t], h)
            outs.append(h)
        return torch.stack(outs, 1), h


class Attention(nn.Module):
    def __init__(self, hid):
        super().__init__()
        self.attn = nn.Linear(2 * hid, hid)
        self.v = nn.Parameter(torch.rand(hid))
        stdv = 1. / math.sqrt(self.v.size(0))
        self.v.data.uniform_(-stdv, stdv)

    def forward(self, hidden, encoder_outputs):
        h = hidden.unsqueeze(1).expand(-1, encoder_outputs.size(1), -1)
        energy = torch.relu(self.attn(torch.cat([h, encoder_outputs], 2)))
        v = self.v.expand(energy.size(0), -1).unsqueeze(1)
        return torch.softmax(torch.bmm(v, energy.transpose(1, 2)).squeeze(1), dim=1).unsqueeze(1)


class DecoderRNN(nn.Module):
    def __init__(self, vocab, emb, hid):
        super().__init__()
        self.embed = nn.Embedding(vocab, emb)
        self.attention = Attention(hid)
        self.cell = nn.GRUCell(hid + emb, hid)
        self.out = nn.Linear(hid * 2, vocab)

    def forward(self, input, last_hidden, encoder_outputs):
        embedded = self.embed(input)
        attn_weights = self.attention(last_hidden, encoder_outputs)
        context = attn_weights.bmm(encoder_outputs).squeeze(1)
        hidden = self.cell(torch.cat([embedded, context], 1), last_hidden)
        output = self.out(torch.cat([hidden, context], 1))
        return torch.log_softmax(output, dim=1), hidden


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        outputs = []
        encoder_output, hidden = self.encoder(src)
        output = trg[:, 0]  # sos
        for t in range(1, trg.size(1)):
            output, hidden = self.decoder(output, hidden, encoder_output)
            outputs.append(output)
            is_teacher = random.random() < teacher_forcing_ratio
            top1 = output.data.max(1)[1]
            # always teacher forced in this experiment, argmax is too jumpy
            output = trg[:, t] if is_teacher or True else top1
        return torch.stack(outputs, 1)


def clear_grads(model):
    # faster than zero_grad()
    for p in model.parameters():
        p.grad = None


def get_batch(bs=12, length=5):
    src = torch.randint(3, VOCAB, (bs, length))
    trg = torch.cat([torch.full((bs, 1), SOS), src.flip(1), torch.full((bs, 1), EOS)], 1)
    return src.to(device), trg.to(device)


def evaluate(model, batches):
    model.eval()
    total_loss = 0
    with torch.no_grad():
        for src, trg in batches:
            output = model(src, trg, teacher_forcing_ratio=0.0)
            loss = nn.functional.nll_loss(output.reshape(-1, VOCAB).float(), trg[:, 1:].reshape(-1), ignore_index=PAD)
            total_loss += loss.item()
    return total_loss / len(batches)


def train(e, model, optimizer, n_batches, grad_clip):
    model.train()
    total_loss = 0
    for b in range(n_batches):
        src, trg = get_batch()
        clear_grads(model)
        output = model(src, trg)
        loss = nn.functional.nll_loss(output.reshape(-1, VOCAB), trg[:, 1:].reshape(-1), ignore_index=PAD)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), grad_clip)
        optimizer.step()
        total_loss += loss.item()
        print("step %d loss %s" % (e * n_batches + b, repr(loss.item())))
    return total_loss / n_batches


def main():
    random.seed(4)
    torch.manual_seed(4)
    val = [get_batch() for _ in range(2)]
    model = Seq2Seq(EncoderRNN(VOCAB, 12, 16), DecoderRNN(VOCAB, 12, 16)).to(device)
    optimizer = optim.SGD(model.parameters(), lr=3.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
    best_val_loss = None
    for e in range(2):
        train_loss = train(e, model, optimizer, 7, 0.5)
        val_loss = evaluate(model, val)
        print("eval %d loss %r" % (e, val_loss))
        if not best_val_loss or val_loss < best_val_loss:
            torch.save(model.state_dict(), '/dev/null')
            best_val_loss = val_loss


if __name__ == "__main__":
    main()
