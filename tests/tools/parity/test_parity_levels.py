import pytest
import torch

from ampcompat.amp import levels
from ampcompat.amp.properties import _DTYPE_NAMES
from ampcompat.cli._options import level_names
from ampcompat.tools.dtypes import SPELLINGS
from ampcompat.tools.parity.levels import Level, read_levels


@pytest.mark.parametrize(
    ("levels", "dtypes", "names"),
    [
        ("O1,O0,O2", "fp16,bf16", ["O0", "O1 fp16", "O1 bf16", "O2 fp16", "O2 bf16"]),
        ("O2", "fp16", ["O0", "O2 fp16"]),  # O0 is there if not asked for
        ("O4,O5", "fp16,bf16", ["O0", "O4", "O5"]),  # these have a dtype of their own
        (" O1, O1,", "fp16,float16", ["O0", "O1 fp16"]),
    ],
)
def test_what_is_run(levels, dtypes, names):
    assert [level.name for level in read_levels(levels, dtypes)] == names


def test_environment():
    assert Level("O1", "bfloat16").environment == {"AMPCOMPAT_OPT_LEVEL": "O1", "AMPCOMPAT_DTYPE": "bfloat16"}
    assert Level("O0").environment == {"AMPCOMPAT_OPT_LEVEL": "O0", "AMPCOMPAT_DTYPE": ""}


@pytest.mark.parametrize(
    ("levels", "dtypes", "match"),
    [("01", "fp16", "'01' is not an opt_level"), ("O1", "half", "dtype"), ("", "fp16", "empty"), ("O1", ",", "empty")],
)
def test_bad_lists_are_refused(levels, dtypes, match):
    with pytest.raises(ValueError, match=match):
        read_levels(levels, dtypes)


def test_the_words_are_those_that_amp_knows():
    assert level_names() == list(levels.LEVELS)
    assert set(SPELLINGS.values()) <= set(_DTYPE_NAMES)


@pytest.mark.parametrize(("dtype", "runs"), [("float16", ["O6 fp16", "O6 bf16"]), ("bfloat16", ["O6"])])
def test_a_new_row_of_the_table_is_a_level_here_too(monkeypatch, dtype, runs):
    half = getattr(torch, dtype)
    row = levels.Level("O6:  a new one.", half, False, None, True, False, "dynamic")
    monkeypatch.setitem(levels.LEVELS, "O6", row)
    assert [level.name for level in read_levels("O6", "fp16,bf16")] == ["O0", *runs]


def test_a_level_with_a_digit_is_answered_by_the_letter():
    with pytest.raises(ValueError, match=r"Did you mean O1, with the letter O\?"):
        read_levels("01", "fp16")
