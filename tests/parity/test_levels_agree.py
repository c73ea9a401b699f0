"""The scenarios that apex was recorded with, at each level against float32: what precision alone changes."""

import pytest
import scenarios

from ampcompat import amp
from ampcompat.testing import assert_opt_level_parity

# Half a per cent in fp16 (11 bits) and 3 % in bf16 (8 bits): a few roundings of an activation, over 8 to 12 steps.
FP16, BF16 = 5e-3, 3e-2


def losses_of(name):
    return lambda level: getattr(scenarios, name)(amp, opt_level=level)["loss"]


@pytest.mark.parametrize(("levels", "rtol"), [(("O1", "O2", "O3"), FP16), (("O4", "O5"), BF16)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "convbn"])
def test_losses_are_those_of_float32(name, levels, rtol):
    losses = assert_opt_level_parity(losses_of(name), levels, rtol)
    assert all(losses[level] != losses["O0"] for level in levels)


def test_a_transformer_block_agrees_except_at_o3():
    """At O3 Adam steps half weights, and its loss is nan."""
    assert_opt_level_parity(losses_of("block"), ("O1", "O2"), FP16)
    assert_opt_level_parity(losses_of("block"), ("O4", "O5"), BF16)
    # Adam's eps of 1e-8 is zero in float16.
    with pytest.raises(AssertionError, match="O3 .* FAIL: loss nan at step 2"):
        assert_opt_level_parity(losses_of("block"), ("O3",), FP16)
