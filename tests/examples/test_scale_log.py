"""The example that records a loss scale: its records are a history that the transition of the scale allows."""

import runpy

import pytest


@pytest.fixture(scope="module")
def example():
    from pathlib import Path

    return runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "scale_log.py"))


def test_each_record_follows_from_the_one_before(example, tmp_path):
    records = example["train"]()
    assert [record.step for record in records] == list(range(1, example["STEPS"] + 1))
    scale, passes = 2.0**16, 0
    for record in records:
        grows = not record.skipped and passes + 1 == example["GROWTH_INTERVAL"]
        scale = scale / 2 if record.skipped else scale * 2 if grows else scale
        passes = 0 if record.skipped or grows else passes + 1
        assert (record.scale, record.clean_passes) == (scale, passes)
    assert any(record.skipped for record in records[100:])  # the picture shows a growth that was too much
    example["draw"](records, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
