"""What one rank sends in an optimizer step, in closed form, from sizes and a layout: for predictions, tested by counting.

Ring algorithms: gathering or scattering n bytes over g ranks sends n (g - 1) / g from each, an all-reduce twice that.

    dense matrices   gathered over data_shard x expert ranks, gradients scattered over them (fp32)
    experts          E / expert of them a rank: gathered over data_shard ranks, gradients scattered over them (fp32)
    replicas         each rank's shard of the gradients, all-reduced over data_replicate
    whole            gradients of vectors and routers, all-reduced over all ranks
    rows             of N = T x K routed rows a batch and layer, (expert - 1) / expert leave the rank: there and back, in both
                     passes; the weights there and their gradients back (4 bytes each)

Weights are gathered once a step where units stay gathered (`shard.fits_gathered`), else twice a batch; gradients are
reduced as often as a step or a batch ends, those of whole copies once a step.
"""

from typing import NamedTuple


class Sizes(NamedTuple):
    """Parameters by how they are spread (dense matrices, experts of all layers together, whole on every rank), MoE layers,
    width, and routed rows of a batch in one layer."""

    dense: float
    experts: float
    whole: float
    moe_layers: int
    width: int
    rows: float


class Traffic(NamedTuple):
    """Bytes that one rank sends in a step, by what they are. The sum over the first three is FSDP2's."""

    weights: float
    gradients: float
    replicas: float
    whole: float
    rows: float


def traffic(sizes: Sizes, replicas: int, shards: int, expert: int, batches: int, low: bool, stay_gathered: bool) -> Traffic:
    """batches: a rank's, in a step. low: bf16 weights and rows (else fp32)."""
    weight = 2 if low else 4
    copies = shards * expert == 1
    gathers, reductions = (1, 1) if stay_gathered or copies else (2 * batches, batches)
    dense, experts = _part(shards * expert) * sizes.dense, _part(shards) * sizes.experts / expert
    held = sizes.dense / (shards * expert) + sizes.experts / (shards * expert)
    per_row = 4 * sizes.width * weight + 2 * 4
    return Traffic(
        weights=gathers * weight * (dense + experts),
        gradients=reductions * 4 * (dense + experts),
        replicas=reductions * 4 * 2 * _part(replicas) * held,
        whole=4 * 2 * _part(replicas * shards * expert) * sizes.whole,
        rows=batches * sizes.moe_layers * sizes.rows * _part(expert) * per_row,
    )


def gathered_parameters(dense: float, experts: float, replicas: int, shards: int, expert: int) -> float:
    """Parameters that one rank gathers in all its units. Experts that it alone holds are in none, nor is anything of a copy."""
    if shards * expert == 1:
        return 0.0
    return dense + (experts / expert if replicas * shards > 1 else 0.0)


def gathered_bytes(gathered: float, low: bool) -> float:
    """Bytes of one rank's gathered weights and unreduced fp32 gradients, while units stay gathered."""
    return gathered * ((2 if low else 4) + 4)


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks
