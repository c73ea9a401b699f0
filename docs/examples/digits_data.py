"""The 1,797 hand-written digits of the UCI repository, read with the standard library (see data/README.md)."""

import csv
import gzip
import random
from pathlib import Path

import torch

FILE = Path(__file__).with_name("data") / "digits.csv.gz"
TEST_SIZE = 600
SPLIT_SEED = 2020


def read_digits():
    """All digits in the order of the file: images (1797, 1, 8, 8) float32 in [0, 1], labels (1797,) int64."""
    with gzip.open(FILE, "rt", newline="") as file:
        rows = [[int(cell) for cell in row] for row in csv.reader(file)]
    table = torch.tensor(rows)
    return table[:, :64].float().div(16).view(-1, 1, 8, 8), table[:, 64]


def load_digits():
    """``(train_images, train_labels), (test_images, test_labels)``: a fixed, seeded split of 1,197 and 600."""
    images, labels = read_digits()
    order = list(range(len(labels)))
    random.Random(SPLIT_SEED).shuffle(order)
    test, train = torch.tensor(order[:TEST_SIZE]), torch.tensor(order[TEST_SIZE:])
    return (images[train], labels[train]), (images[test], labels[test])
