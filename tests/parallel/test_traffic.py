"""The closed form of what a rank sends, against what it did send."""

import numpy as np
import pytest

from bmoe.parallel.traffic import Sizes, gathered_bytes, gathered_parameters, traffic


@pytest.mark.parametrize("stay_gathered", [True, False])
@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 1, 2)])
def test_bytes_are_those_that_were_counted(ranks, layout, stay_gathered):
    world, batches, layers = int(np.prod(layout)), 8 // int(np.prod(layout)), 2
    for counted in ranks(world).run("count_traffic", layout=layout, stay_gathered=stay_gathered):
        rows = counted["routed"] / (2 * batches * layers * 2)  # forward there and back, backward there and back, 2 sends a pass
        sizes = Sizes(counted["dense"], counted["experts"], counted["whole"], layers, 32, rows)
        want = traffic(sizes, *layout, batches, low=False, stay_gathered=stay_gathered)
        tolerance = {"rel": 0.08, "abs": 3000}  # padding to equal shards; the root stays gathered after its forward pass
        assert counted["gather"] == pytest.approx(want.weights, **tolerance)
        assert counted["scatter"] == pytest.approx(want.gradients, **tolerance)
        assert counted["reduce"] == pytest.approx(want.replicas + want.whole, **tolerance)
        if layout[2] == 1:
            assert counted["rows"] == want.rows == 0
        else:  # routing is not uniform: of the rows, 0.3 to 0.7 leave at two ranks
            assert 0.5 * want.rows < counted["rows"] < 1.6 * want.rows


def test_gathered_bytes_of_the_flagship():
    flagship = {"dense": 160e6, "experts": 2.64e9}
    assert gathered_bytes(gathered_parameters(**flagship, replicas=1, shards=8, expert=1), low=True) == pytest.approx(16.8e9, rel=1e-3)
    assert gathered_bytes(gathered_parameters(**flagship, replicas=1, shards=2, expert=8), low=True) == pytest.approx(2.94e9, rel=1e-3)
    assert gathered_bytes(gathered_parameters(**flagship, replicas=1, shards=1, expert=8), low=True) == pytest.approx(0.96e9, rel=1e-3)
