"""The data of the digits example: its file, its licence, its split and its reader."""

import gzip
import hashlib
from pathlib import Path

import pytest
import torch

COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
FIRST_TRAIN = [6, 4, 3, 9, 2, 8, 7, 3, 5, 4]
FIRST_TEST = [1, 2, 3, 0, 0, 6, 8, 3, 5, 8]


@pytest.fixture
def data(examples):
    import digits_data

    return digits_data


def test_the_file_is_the_one_that_its_readme_describes(examples):
    raw = gzip.decompress((examples / "data" / "digits.csv.gz").read_bytes())
    readme = (examples / "data" / "README.md").read_text()
    assert hashlib.sha256(raw).hexdigest() in readme
    assert raw.count(b"\n") == 1797
    assert "1,797" in readme


def test_the_authors_and_the_licence_are_named(examples):
    readme = (examples / "data" / "README.md").read_text()
    for words in ("E. Alpaydin", "C. Kaynak", "Optical Recognition of Handwritten Digits", "UCI", "Attribution 4.0"):
        assert words in readme


def test_images_and_labels(data):
    images, labels = data.read_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert torch.equal(images * 16, (images * 16).round())
    assert torch.bincount(labels).tolist() == COUNTS


def test_the_split_is_fixed_and_without_overlap(data):
    images, labels = data.read_digits()
    (train_x, train_y), (test_x, test_y) = data.load_digits()
    assert (len(train_x), len(train_y), len(test_x), len(test_y)) == (1197, 1197, 600, 600)
    both = torch.cat([train_y, test_y])
    assert torch.bincount(both).tolist() == COUNTS
    as_rows = lambda x: sorted(map(tuple, x.flatten(1).tolist()))  # noqa: E731
    assert as_rows(torch.cat([train_x, test_x])) == as_rows(images)
    # The first of each part, so that another split is noticed: published accuracies are those of this one.
    assert train_y[:10].tolist() == FIRST_TRAIN
    assert test_y[:10].tolist() == FIRST_TEST
    assert torch.bincount(test_y, minlength=10).min() >= 40


def test_the_reader_needs_no_more_than_torch(examples):
    source = Path(examples / "digits_data.py").read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"csv", "gzip", "random", "pathlib", "torch"}
