"""What `bmoe profile` of several ranks stands on: one checkpoint goes on alike in every layout, and a fault does not pass unseen;
the other side of a comparison is what it is on one process."""

import pytest

from bmoe.jobs.layouts import ways


def test_every_layout_goes_on_from_one_checkpoint(ranks):
    for results in ranks(4).run("all_layouts"):
        rows = results["layouts"]
        assert [(row["data_shard"], row["expert"]) for row in rows] == [(4, 1), (2, 2), (1, 4)]
        assert results["saved_in"] == {"data_shard": 2, "expert": 2}
        assert results["agree"] and all(row["norms_equal"] and row["norm_difference"] < 1e-5 for row in rows)
        for row in rows:
            assert row["losses"] == pytest.approx(results["undisturbed"]["losses"], rel=1e-5) and len(set(row["losses"])) == 3


def test_a_norm_over_own_shards_is_seen(ranks):
    """It clips each rank's step differently, so that the copies of the weights drift apart."""
    for results in ranks(2).run("all_layouts", fault="a norm over own shards"):
        assert "have drifted" in results["refused"]


def test_a_checkpoint_that_is_not_loaded_is_seen(ranks):
    """All layouts agree with each other then, but not with the run that went on."""
    for results in ranks(2).run("all_layouts", fault="a checkpoint that is not loaded"):
        assert not results["agree"] and all(row["norms_equal"] for row in results["layouts"])


@pytest.mark.parametrize("size, experts, found", [(8, 64, [(8, 1), (4, 2), (2, 4), (1, 8)]), (6, 8, [(6, 1), (3, 2)]), (1, 8, [(1, 1)])])
def test_ways_to_share(size, experts, found):
    assert ways(size, experts) == found


def test_the_baseline_under_fsdp2_computes_what_one_process_does(ranks):
    pytest.importorskip("transformers")
    assert max(ranks(2).run("sharded_mixtral")) < 1e-5
