"""Logistic regression with an L1 penalty, on the device where the features are.

    minimise over w   |w|_1 + C sum_p log(1 + exp(-y_p w.x_p)),   y_p = 1 or -1

A constant feature 1 stands last in x, its weight penalised like the others: the problem of liblinear, and so of ESM's contact
regression. Solved by Newton steps in the coordinates that are not at rest at 0 (Yuan, Ho and Lin 2012): each is the minimum of
g.d + d.H d / 2 + |w + d|_1 by coordinate descent, then a line search. A step goes through all features for the gradient g, and
through the few that move for the Hessian H and the change of w.x; about ten steps are needed.

Legend: P rows, A features and the constant, B of them in a step.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bmoe.evaluation.forward import check_numbers

PIECE = 65_536  # rows taken to float64 at a time
STEPS, SWEEPS = 100, 1000
TOLERANCE = 1e-4  # of the largest violation of a subgradient condition at w = 0
INNER = 0.01  # of the violation, left over by coordinate descent
DESCENT = 0.01  # Armijo's constant of the line search


def fit(features: list[Tensor], positive_P: Tensor, strength: float, device: torch.device) -> Tensor:
    """Weights [A], float64 on `device`, of features, fp32 on any device: their rows one after the other are [P, A - 1]. Bool
    `positive_P`. strength: C. RequestError for features that are no numbers, of a model whose weights are none."""
    pieces = [piece_PA for part_PA in features for piece_PA in part_PA.split(PIECE)]
    sign_P = positive_P.to(device).double() * 2 - 1
    margin_P = torch.zeros_like(sign_P)
    w_A, first = np.zeros(features[0].shape[1] + 1), 0.0
    value = _loss(margin_P, sign_P, strength)
    for step in range(STEPS):
        wrong_P = torch.sigmoid(-sign_P * margin_P)
        g_A = _gradient(pieces, -strength * sign_P * wrong_P)
        check_numbers(g_A, "features")
        violation_A = np.where(w_A != 0, np.abs(g_A + np.sign(w_A)), np.maximum(np.abs(g_A) - 1, 0))
        first = violation_A.max() if step == 0 else first
        if violation_A.max() <= TOLERANCE * first:
            break
        moving = np.flatnonzero((w_A != 0) | (violation_A > 0))
        chosen_PB = torch.cat([_columns(piece_PA, moving, device) for piece_PA in pieces])
        h_BB = _hessian(chosen_PB, strength * wrong_P * (1 - wrong_P))
        d_B = newton_step(w_A[moving], g_A[moving], h_BB, INNER * violation_A.max())
        change_P = torch.cat([x.double() @ torch.from_numpy(d_B).to(device) for x in chosen_PB.split(PIECE)])
        there_A = w_A.copy()
        norm, size = np.abs(w_A).sum(), 1.0
        slope = g_A[moving] @ d_B + np.abs(w_A[moving] + d_B).sum() - np.abs(w_A[moving]).sum()
        while True:
            there_A[moving] = w_A[moving] + size * d_B
            tried = _loss(margin_P + size * change_P, sign_P, strength)
            if tried + np.abs(there_A).sum() <= value + norm + DESCENT * size * slope:
                break
            size /= 2
            if size < 1e-9:  # no descent is left in float64
                return torch.from_numpy(w_A).to(device)
        w_A, margin_P, value = there_A, margin_P + size * change_P, tried
    return torch.from_numpy(w_A).to(device)


def probability(features_PA: Tensor, weight_A: Tensor) -> Tensor:
    """Chance of each row to be positive, float64 [P] on the weights' device."""
    used = np.flatnonzero(weight_A[:-1].cpu().numpy())
    chosen_PB = features_PA[:, torch.from_numpy(used).to(features_PA.device)].to(weight_A.device)
    return (chosen_PB.double() @ weight_A[:-1][torch.from_numpy(used).to(weight_A.device)] + weight_A[-1]).sigmoid()


def _gradient(pieces: list[Tensor], pull_P: Tensor) -> np.ndarray:
    """pull.x and, for the constant, its sum, [A]; products in fp32, sums of pieces in float64."""
    out_A = torch.zeros(pieces[0].shape[1], dtype=torch.float64, device=pull_P.device)
    for x_PA, pull in zip(pieces, pull_P.split([piece.shape[0] for piece in pieces]), strict=True):
        out_A += pull.to(x_PA.dtype) @ x_PA.to(pull.device)
    return torch.cat([out_A, pull_P.sum()[None]]).cpu().numpy()


def _columns(features_PA: Tensor, chosen: np.ndarray, device: torch.device) -> Tensor:
    """Some features, the constant among them if its number (the last) is chosen, fp32 [P, B] on `device`."""
    A = features_PA.shape[1]
    out_PB = features_PA[:, torch.from_numpy(chosen[chosen < A]).to(features_PA.device)].to(device)
    return F.pad(out_PB, (0, 1), value=1.0) if chosen[-1] == A else out_PB


def _hessian(chosen_PB: Tensor, weight_P: Tensor) -> np.ndarray:
    out_BB = torch.zeros(chosen_PB.shape[1], chosen_PB.shape[1], dtype=torch.float64, device=weight_P.device)
    for x_PB, weight in zip(chosen_PB.split(PIECE), weight_P.split(PIECE), strict=True):
        x_PB = x_PB.double()
        out_BB += x_PB.T @ (x_PB * weight[:, None])
    return out_BB.cpu().numpy()


def _loss(margin_P: Tensor, sign_P: Tensor, strength: float) -> float:
    return strength * float(F.softplus(-sign_P * margin_P, threshold=50.0).sum())


def newton_step(w_B: np.ndarray, g_B: np.ndarray, h_BB: np.ndarray, rest: float) -> np.ndarray:
    """The d that minimises g.d + d.H d / 2 + |w + d|_1, by coordinate descent: all coordinates, then those that are not 0
    until they rest, and again. At rest no coordinate violates its subgradient condition by more than `rest`."""
    curve_B = np.diag(h_BB) + 1e-12
    to_B, slope_B = w_B.copy(), g_B.copy()  # w + d, and the gradient of the smooth part there

    def sweep(coordinates: np.ndarray) -> float:
        largest = 0.0
        for b in coordinates:
            free = to_B[b] - slope_B[b] / curve_B[b]
            change = np.sign(free) * max(abs(free) - 1.0 / curve_B[b], 0.0) - to_B[b]
            if change:
                to_B[b] += change
                slope_B[:] += change * h_BB[b]
                largest = max(largest, abs(change) * curve_B[b])
        return largest

    everything, whole = np.arange(w_B.size), True
    for _ in range(SWEEPS):
        moved = sweep(everything if whole else np.flatnonzero(to_B))
        if whole and moved <= rest:
            break
        whole = moved <= rest
    return to_B - w_B
