"""The L1 regression: its optimum by the subgradient conditions and by scikit-learn's liblinear, and its Newton step by hand."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import l1

CPU = torch.device("cpu")
STRENGTH = 0.15


def problem(rows: int, features: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Correlated features of which two matter, rare positives; a pair of equal columns, as two heads may give."""
    generator = np.random.default_rng(0)
    shared = generator.normal(size=(rows, 4)) @ generator.normal(size=(4, features)) * 0.5
    x = (shared + generator.normal(size=(rows, features))).astype(np.float32)
    x[:, -1] = x[:, -2]
    y = generator.random(rows) < 1 / (1 + np.exp(3 - 2 * x[:, 0] + x[:, 1]))
    return x * np.float32(scale), y


def objective(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return np.abs(w).sum() + STRENGTH * np.logaddexp(0, -np.where(y, 1, -1) * (x @ w[:-1] + w[-1])).sum()


@pytest.mark.parametrize(("rows", "features", "scale"), [(3000, 10, 1.0), (4000, 30, 0.05), (300, 200, 0.3)])
def test_the_optimum_of_liblinear(rows, features, scale, monkeypatch):
    """scikit-learn as ESM calls it; more features than rows too. Pieces of 1,000 rows, so that there are several."""
    linear = pytest.importorskip("sklearn.linear_model")
    monkeypatch.setattr(l1, "PIECE", 1000)
    x, y = problem(rows, features, scale)
    w = l1.fit([torch.from_numpy(x)], torch.from_numpy(y), STRENGTH, CPU)
    theirs = linear.LogisticRegression(l1_ratio=1.0, C=STRENGTH, solver="liblinear", tol=1e-8, max_iter=100_000, random_state=0).fit(x, y)
    expected = np.append(theirs.coef_[0], theirs.intercept_)
    assert objective(w.numpy(), x, y) == pytest.approx(objective(expected, x, y), rel=1e-6)
    ours, wanted = l1.probability(torch.from_numpy(x), w).numpy(), theirs.predict_proba(x)[:, 1]
    assert np.abs(ours - wanted).max() < 1e-3 and wanted.max() > 0.4


def test_the_subgradient_conditions_hold():
    x, y = problem(3000, 10, 1.0)
    w = l1.fit([torch.from_numpy(x)], torch.from_numpy(y), STRENGTH, CPU).numpy()
    sign = np.where(y, 1, -1)
    pull = STRENGTH * (sign / (1 + np.exp(sign * (x @ w[:-1] + w[-1])))) @ np.c_[x, np.ones(len(x))]
    assert np.allclose(pull[w != 0], np.sign(w[w != 0]), atol=0.02)
    assert (np.abs(pull[w == 0]) <= 1.02).all() and w[0] > 1.0 and w[1] < -0.5


def test_nothing_to_learn_gives_the_constant_alone():
    """Features of 0: w.x is the constant's weight b; its optimum has C (positives / (1 + e^b) - negatives / (1 + e^-b)) = sign b."""
    y = torch.arange(400) < 40
    w = l1.fit([torch.zeros(150, 3), torch.zeros(250, 3)], y, STRENGTH, CPU).numpy()
    p = 1 / (1 + np.exp(-w[-1]))
    assert not w[:-1].any() and STRENGTH * (40 * (1 - p) - 360 * p) == pytest.approx(-1.0, abs=0.02)


def test_features_that_are_no_numbers_are_refused():
    x = torch.rand(50, 3)
    x[7, 1] = torch.nan
    with pytest.raises(RequestError, match="features that are no numbers; name an earlier checkpoint"):
        l1.fit([x], torch.arange(50) < 20, STRENGTH, CPU)


def test_newton_step_by_hand():
    """g = (-3, 0.5), H = diag(2, 1), w = 0: d = ((3 - 1) / 2, 0). With w = (1, 2): the minimum of each coordinate moves to
    w + d = ((2 + 3 - 1) / 2, 2 - 0.5 - 1)."""
    g, h = np.array([-3.0, 0.5]), np.diag([2.0, 1.0])
    assert l1.newton_step(np.zeros(2), g, h, 1e-9) == pytest.approx([1.0, 0.0])
    assert l1.newton_step(np.array([1.0, 2.0]), g, h, 1e-9) == pytest.approx([1.0, -1.5])
