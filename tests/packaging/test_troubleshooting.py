"""Troubleshooting and the FAQ quote messages word for word.

They are those of torch and numpy, and those of this package that do not say how to fix what they report.
"""

import argparse
import io
import re
from collections.abc import Iterator
from pathlib import Path

import messages
import pytest
import torch
from packaging.version import Version

DOCS = Path(__file__).parents[2] / "docs"

#: Folders whose messages a training script may meet; the tools that read code report findings of their own.
FOLDERS = ["amp", "tools/explain", "fp16_utils", "mlp", "multi_tensor_apply", "normalization", "optimizers", "parallel"]
FOLDERS += ["tools/report", "testing"]
#: Messages that Python itself would give, and one of a broken invariant.
NOT_QUOTED = re.compile("object has no attribute|module … has no attribute|… has no tensor ….")


def quoted(page: str) -> list[str]:
    """The messages in the first column of the page's tables."""
    found: list[str] = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cell = line[2 : line.index(" |", 2)]
            found += [text.strip() for _, text in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    return found


def matches(entry: str, text: str) -> bool:
    pattern = ".*?".join(map(re.escape, entry.split("…")))
    return re.match(pattern, text, re.DOTALL) is not None


def of_the_package() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        yield from messages.messages(messages.PACKAGE / folder).items()


ENTRIES = quoted("troubleshooting.md")


def test_messages_are_found_in_the_source():
    found = dict(of_the_package())
    assert len(found) > 100
    assert any(text.startswith("Invoked 'with amp.scale_loss'") for text in found)
    assert any("the optimizer holds the old one" in text for text in found)


def says_its_fix(text: str) -> bool:
    """Whether the message reads: what was passed - what is allowed - how to fix it."""
    return text.count(" - ") >= 2


def test_messages_that_do_not_say_their_fix_are_on_the_page():
    missing = [
        f"{place}: {text}"
        for text, place in of_the_package()
        if not says_its_fix(text) and not NOT_QUOTED.search(text) and not any(matches(entry, text) for entry in ENTRIES)
    ]
    assert missing == [], "quote the beginning of each in docs/troubleshooting.md"


def test_mistakes_that_are_warned_of_are_on_the_page():
    from ampcompat.amp import misuse

    texts = [text for name, text in vars(misuse).items() if name.isupper() and isinstance(text, str) and " - " in text]
    assert len(texts) > 4
    assert [text for text in texts if not any(matches(entry, text) for entry in ENTRIES)] == []


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def a_scaler() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, torch.nn.Linear]:
    model = torch.nn.Linear(1, 1)
    return torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1), model


def unscale_twice() -> None:
    scaler, optimizer, model = a_scaler()
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_half() -> None:
    scaler, optimizer, model = a_scaler()
    model.half()
    scaler.scale(model(torch.ones(1, 1).half()).sum()).backward()
    scaler.unscale_(optimizer)


def step_without_gradients() -> None:
    scaler, optimizer, _ = a_scaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def step_between() -> None:
    _, optimizer, model = a_scaler()
    loss = model(model(torch.ones(1, 1))).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def scheduler_first() -> None:
    _, optimizer, _ = a_scaler()
    torch.optim.lr_scheduler.StepLR(optimizer, 1).step()


def numpy_name(name: str) -> None:
    import numpy

    getattr(numpy, name)


HALF, FLOAT = torch.ones(4, 4).half(), torch.ones(4, 4)
IMAGE = torch.ones(1, 1, 2, 2)
FROM_TORCH = {
    "fill": lambda: HALF.masked_fill(HALF > 0, -1e9),
    "linear": lambda: torch.nn.Linear(4, 4).half()(FLOAT),
    "mm": lambda: HALF @ FLOAT,
    "float input": lambda: torch.nn.Conv2d(1, 1, 1).half()(IMAGE),
    "half input": lambda: torch.nn.Conv2d(1, 1, 1)(IMAGE.half()),
    "index put": lambda: HALF.clone().__setitem__(torch.tensor([0]), FLOAT[:1]),
    "scatter": lambda: HALF.clone().scatter_(0, torch.zeros(1, 4, dtype=torch.long), FLOAT[:1]),
    "index add": lambda: HALF.clone().index_add_(0, torch.tensor([0]), FLOAT[:1]),
    "int in place": lambda: torch.ones(2, dtype=torch.int).mul_(1.5),
    "cholesky": lambda: torch.linalg.cholesky(HALF),
    "inverse": lambda: torch.inverse(HALF),
    "weights only": lambda: torch.load(saved(argparse.Namespace(lr=1)), weights_only=True),
    "no inf checks": step_without_gradients,
    "unscale twice": unscale_twice,
    "unscale half": unscale_half,
    "GradScaler": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "autocast": lambda: torch.cuda.amp.autocast(enabled=False),
    "scheduler first": scheduler_first,
}
OLD_SCRIPTS = {
    "torch._six": lambda: __import__("torch._six"),
    "numpy.float": lambda: numpy_name("float"),
    "view": lambda: torch.ones(10, 5).t()[:2].view(-1),
    "data[0]": lambda: torch.ones(()).data[0],
    "bool minus": lambda: 1 - (FLOAT > 0),
    "addcmul": lambda: FLOAT.clone().addcmul_(0.5, FLOAT, FLOAT),
    "step between": step_between,
}
CASES = [("troubleshooting.md", *case) for case in FROM_TORCH.items()]
CASES += [("faq.md", *case) for case in OLD_SCRIPTS.items()]


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="the pages quote torch 2.13")
@pytest.mark.parametrize(("page", "name", "provoke"), CASES, ids=[f"{page}-{name}" for page, name, _ in CASES])
def test_messages_of_torch_are_quoted_word_for_word(page, name, provoke):
    with pytest.raises(BaseException) as caught:  # warnings are errors
        provoke()
    text = str(caught.value)
    assert any(matches(entry, text) for entry in quoted(page)), text
