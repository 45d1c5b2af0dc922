"""What several ranks must agree on: weights of replicas, the last step, the words of a refusal, low-precision runs."""

import numpy as np
import pytest


@pytest.mark.parametrize(
    "what, words",
    [
        ("nothing", "agree"),
        ("whole", "weights of rank 1 have drifted from rank 0"),
        ("position", "rank 1 is at another place in the data"),
        ("data", "rank 1 reads another sequence at the same place than rank 0"),
    ],
)
def test_drift_of_whole_parameters_and_places_is_found(ranks, what, words):
    for told in ranks(2).run("drift", layout=(1, 1, 2), what=what):
        assert words in told


@pytest.mark.parametrize("what, words", [("nothing", "agree"), ("part", "weights of rank 3 have drifted from rank 1")])
def test_drift_of_a_replica_is_found(ranks, what, words):
    for told in ranks(4).run("drift", layout=(2, 1, 2), what=what, culprit=3):
        assert words in told


@pytest.mark.parametrize("culprit, other", [(0, 1), (2, 0)])
def test_of_several_copies_the_one_that_most_do_not_share_is_named(ranks, culprit, other):
    for told in ranks(4).run("drift", layout=(4, 1, 1), what="whole", culprit=culprit):
        assert f"weights of rank {culprit} have drifted from rank {other}'s" in told


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (2, 1, 1)])
def test_one_rank_that_is_not_finite_has_all_skip_the_step(ranks, layout):
    found = ranks(2).run("one_bad_rank", layout=layout)
    assert [(skipped, left_alone) for skipped, _, left_alone in found] == [(1, True)] * 2
    for norms in zip(*(norms for _, norms, _ in found), strict=True):
        assert len({repr(norm) for norm in norms}) == 1
    assert [np.isfinite(norm) for norm in found[0][1]] == [True, False, True]


def test_one_rank_that_got_the_signal_stops_all_after_the_next_step(ranks, tmp_path):
    for step, number in ranks(2).run("interrupted", layout=(1, 2, 1), folder=str(tmp_path)):
        assert (step, number) == (4, 15)  # sent to rank 1 during step 3


def test_rank_0_decides_and_refuses_for_all(ranks):
    assert ranks(2).run("decide") == [("0 decided", "0 refused")] * 2


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2)])
def test_bf16_is_near_one_process(ranks, layout):
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("cases", Path(__file__).parent / "cases.py")
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    options = {"dtype": "float32", "precision": {"kind": "bf16"}, "backend": {"experts": "grouped"}}
    want = cases.train(0, 1, **options)
    for got in ranks(2).run("train", layout=layout, **options):
        assert got["losses"][:, 0] == pytest.approx(want["losses"][:, 0], rel=5e-3)
        assert got["norms"] == pytest.approx(want["norms"], rel=3e-2)
