"""The layer benchmark: what it counts, and that both sides run the same routing."""

import pytest
import torch

from bmoe.errors import RequestError
from bmoe.profiling import layer

TINY = layer.LayerShape(24, 16, 32, 4, 2)
CPU = torch.device("cpu")


def test_flops_count_three_passes_of_three_matrices():
    assert layer.LayerShape(16384, 2048, 5632, 8, 2).flops == 18 * 16384 * 2 * 2048 * 5632


def test_balanced_choice_is_equal_and_distinct():
    choice_TK = layer.balanced_choice(layer.LayerShape(64, 8, 8, 8, 3), "cpu")
    assert torch.bincount(choice_TK.flatten(), minlength=8).tolist() == [24] * 8
    assert all(len(set(row)) == 3 for row in choice_TK.tolist())


@pytest.mark.parametrize("balanced", [False, True])
def test_ours_and_hugging_face_compute_the_same_layer(balanced):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours, run = layer.contestant("loop", TINY, CPU, torch.float32, balanced)
    theirs, run_theirs = layer.contestant("hf-loop", TINY, CPU, torch.float32, balanced)
    theirs.gate.weight.data.copy_(ours.router.data)
    theirs.experts.gate_up_proj.data.copy_(ours.experts.gate_up.data)
    theirs.experts.down_proj.data.copy_(ours.experts.down.data)
    x_TD = torch.randn(24, 16)
    torch.testing.assert_close(run(x_TD), run_theirs(x_TD))


def test_measures_every_contestant():
    rows = layer.measure(TINY, ["loop", "grouped"], CPU, torch.float32, repeats=3, warmup=1, peak_tflops=1.0)
    assert [row.contestant for row in rows] == ["loop", "grouped"]
    for row in rows:
        assert row.fastest <= row.milliseconds <= row.slowest
        assert row.tflops == pytest.approx(TINY.flops / row.milliseconds / 1e9)


def test_unknown_contestant_is_refused():
    with pytest.raises(RequestError, match="hf-grouped-compiled"):
        layer.contestant("magic", TINY, CPU, torch.float32, False)
