"""The models that are trained, with their data: steps of 4 to 15 ms in float32 on a CPU; filling a GPU there."""

import torch
import torch.nn as nn


class Conv(nn.Module):
    """Three convolutions with batch norm."""

    def __init__(self, width):
        super().__init__()
        layers, last = [], 3
        for scale in (1, 2, 4):
            layers += [nn.Conv2d(last, width * scale, 3, stride=2, padding=1), nn.BatchNorm2d(width * scale), nn.ReLU()]
            last = width * scale
        self.features, self.head = nn.Sequential(*layers), nn.Linear(last, 10)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class Transformer(nn.Module):
    """An encoder with pre-norm layers and mean pooling."""

    def __init__(self, width, layers):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    """One LSTM layer, its last output classified."""

    def __init__(self, width):
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Many(nn.Module):
    """Many small parameters: per-tensor work is all there is."""

    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Bottleneck(nn.Module):
    """ResNet's: 1×1, 3×3 and 1×1 convolutions around a shortcut."""

    def __init__(self, last, width, stride):
        super().__init__()
        out = 4 * width
        layers = []
        for inner, outer, size, step in ((last, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)):
            layers += [nn.Conv2d(inner, outer, size, step, size // 2, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        shortcut = [nn.Conv2d(last, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 or last != out else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width, blocks):
    """ResNet-50's shape at ``width=64, blocks=(3, 4, 6, 3)``."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    last = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(last, width << stage, 2 if stage and not block else 1))
            last = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))


class Bert(nn.Module):
    """Embeddings and post-norm encoder layers with GELU; BERT-base's shape at ``width=768, layers=12``."""

    def __init__(self, width, layers, words=30522):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        # Word numbers from the noise that every model is fed, so that one training loop serves all.
        words = (x.float().abs() * 1000).long() % self.words.num_embeddings
        x = self.words(words) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.encoder(self.norm(x))[:, 0])


def _mlp(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _square_mlp(width, layers):
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


#: name -> (model and input shape on a CPU, the same on a GPU)
MODELS = {
    "MLP": ((lambda: _mlp(512), (64, 512)), (lambda: _mlp(4096), (2048, 4096))),
    "conv + BN": ((lambda: Conv(16), (8, 3, 64, 64)), (lambda: Conv(128), (128, 3, 224, 224))),
    "transformer": ((lambda: Transformer(64, 2), (32, 16, 64)), (lambda: Transformer(768, 12), (32, 128, 768))),
    "LSTM": ((lambda: Recurrent(64), (64, 16, 64)), (lambda: Recurrent(1024), (128, 128, 1024))),
    "many small": ((lambda: Many(60, 16), (16, 16)), (lambda: Many(500, 64), (64, 64))),
    "ResNet-50-like": (
        (lambda: resnet(4, (1, 1, 1, 1)), (2, 3, 32, 32)),
        (lambda: resnet(64, (3, 4, 6, 3)), (128, 3, 224, 224)),
    ),
    "BERT-base-like": ((lambda: Bert(64, 2, 100), (2, 8)), (lambda: Bert(768, 12), (32, 128))),
}
#: Where half arithmetic is native: products large enough that half dtypes pay.
NATIVE = {
    "MLP 4 × 512": ((lambda: _square_mlp(512, 4), (128, 512)), (lambda: _square_mlp(4096, 4), (2048, 4096))),
    "encoder 2 × 256": ((lambda: Transformer(256, 2), (8, 16, 256)), (lambda: Transformer(1024, 2), (64, 128, 1024))),
}
#: Measured on a GPU alone; their small forms are there to be tested.
LARGE = ("ResNet-50-like", "BERT-base-like")


def make(name, device):
    """A model of seed 0 and one batch of inputs and labels."""
    torch.manual_seed(0)
    build, shape = (MODELS | NATIVE)[name][device != "cpu"]
    return build().to(device), torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)
