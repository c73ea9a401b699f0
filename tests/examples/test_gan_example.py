"""The example of a GAN with a loss scaler for each loss."""

import math

import pytest

LEVELS = ["O0", "O1", "O2"]


@pytest.mark.parametrize("level", [at if at == "O2" else pytest.param(at, marks=pytest.mark.slow) for at in LEVELS])
def test_it_trains_and_stays_finite(run_example, level):
    result = run_example("gan.py", "--opt-level", level, "--steps", 60, "--batch-size", 32)
    assert result["finite"]
    assert all(math.isfinite(loss) for loss in result["losses"])
    # Noise becomes something nearer to digits, and not one image only.
    assert result["distance_after"] < 0.9 * result["distance_before"]
    assert result["spread"] > 0.05


@pytest.mark.parametrize("level", LEVELS)
def test_each_loss_has_a_scaler_of_its_own(run_example, capsys, level):
    result = run_example("gan.py", "--opt-level", level, "--steps", 12)
    assert len(result["loss_scales"]) == 3
    skipped = capsys.readouterr().out
    for i, scale in enumerate(result["loss_scales"]):
        halvings = skipped.count(f"loss scaler {i} reducing")
        assert scale == (1.0 if level == "O0" else 65536.0 / 2**halvings)
