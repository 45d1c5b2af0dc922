"""On a GPU: block and current scaling equal Transformer Engine's own quantisers, Triton equals its torch twin; bit for bit.

MXFP8's quantiser cannot be compared here: it exists on Blackwell only (on Hopper it writes nothing).
"""

import pytest
import torch

from bmoe.precision import block, current, mxfp8, nvfp4
from bmoe.precision.float8 import E4M3, E5M2

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def te():
    return pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)


def samples(dtype, shape, specials=False):
    """Values over many binary orders, zero rows, subnormals; with `specials` also infinities and NaN."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=g, device="cuda") * torch.logspace(-38, 37, shape[1], device="cuda")
    x[shape[0] // 2] = 0.0
    x[:, 7] = torch.randn(shape[0], generator=g, device="cuda") * 1e-39
    if specials:
        x[0, 0], x[1, 5], x[2, 9] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype)


def same(a, b):
    """Equal bits, any NaN being equal to any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=7.0, posinf=1e38), b.nan_to_num(nan=7.0, posinf=1e38))


@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("shape", [(256, 512), (384, 640), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_scaling_along_rows_and_columns(te, dtype, shape, specials):
    import transformer_engine_torch as tex

    x = samples(dtype, shape, specials)
    quantizer = te.Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
    q = quantizer(x)
    codes, inverse = block.quantize(x, -1)
    assert torch.equal(q._rowwise_data, codes.view(torch.uint8))
    assert torch.equal(q._rowwise_scale_inv[:, : shape[0]], inverse.T)
    codes, inverse = block.quantize(x, -2)
    assert torch.equal(q._columnwise_data, codes.view(torch.uint8).T)
    assert torch.equal(q._columnwise_scale_inv[:, : shape[1]], inverse)


@pytest.mark.parametrize("specials", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_block_scaling_in_squares(te, dtype, specials):
    import transformer_engine_torch as tex

    x = samples(dtype, (384, 640), specials)
    quantizer = te.Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)
    q = quantizer(x)
    codes, inverse = block.quantize(x, None)
    assert torch.equal(q._rowwise_data, codes.view(torch.uint8))
    assert torch.equal(q._rowwise_scale_inv[:, :5], inverse)
    assert torch.equal(q._columnwise_data, codes.view(torch.uint8).T)


def test_block_scale_of_every_bf16_maximum(te):
    import transformer_engine_torch as tex

    maxima = torch.arange(0x7F80, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = torch.zeros(maxima.numel(), 128, dtype=torch.bfloat16, device="cuda")
    x[:, 3], x[:, 9] = maxima, -maxima / 3
    quantizer = te.Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)
    q = quantizer(x)
    codes, inverse = block.quantize(x, -1)
    assert torch.equal(q._rowwise_scale_inv[:, : x.shape[0]], inverse.T)
    assert torch.equal(q._rowwise_data, codes.view(torch.uint8))


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["wide", "normal", "zero", "tiny", "infinite"])
def test_current_scaling(te, dtype, form, case):
    import transformer_engine_torch as tex

    x = samples(dtype, (256, 512), specials=case == "infinite").nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if case == "normal":
        x = torch.randn(256, 512, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(dtype)
    elif case != "wide" and case != "infinite":
        x = x.sign() * {"zero": 0.0, "tiny": 2.0**-125}[case]
    kind = tex.DType.kFloat8E4M3 if form is E4M3 else tex.DType.kFloat8E5M2
    quantizer = te.Float8CurrentScalingQuantizer(kind, torch.device("cuda"), rowwise=True, columnwise=False)
    q = quantizer(x)
    codes, inverse = current.quantize(x, form)
    assert torch.equal(q._scale_inv.view(()), inverse)
    assert torch.equal(q._data, codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 512), (70, 200), (1, 32), (1030, 96)])
def test_triton_equals_its_twin(dtype, shape):
    from bmoe.precision import fused

    x = samples(dtype, shape, specials=shape[0] > 2 and shape[1] > 9)
    for kind, quantiser in (("mxfp8", mxfp8), ("fp8_block", block)):
        along, down = fused.copies(x, kind)
        assert same(along, quantiser.quantize_dequantize(x, -1))
        assert same(down, quantiser.quantize_dequantize(x, -2))
    assert same(fused.squares(x), block.quantize_dequantize(x, None))


@pytest.mark.parametrize("kind, quantiser", [("mxfp8", mxfp8), ("fp8_block", block)])
def test_triton_starts_blocks_anew_in_every_group(kind, quantiser):
    from bmoe.precision import fused

    sizes = [0, 130, 0, 64, 1, 317] + [5] * 60
    x = samples(torch.bfloat16, (sum(sizes), 160))
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    down = fused.copies(x, kind, ends, rows=False)[1]
    assert same(down, torch.cat([quantiser.quantize_dequantize(part, -2) for part in x.split(sizes)]))


def test_triton_mxfp8_of_every_bf16_maximum():
    from bmoe.precision import fused

    maxima = torch.arange(0x7F80, device="cuda").to(torch.int16).view(torch.bfloat16)
    x = maxima[:, None].expand(-1, 32) * torch.linspace(-1, 1, 32, device="cuda", dtype=torch.bfloat16)
    assert same(fused.copies(x, "mxfp8", columns=False)[0], mxfp8.quantize_dequantize(x))


@pytest.mark.parametrize("axis", [-1, -2, None])
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4_gives_the_same_bytes_on_both_devices(axis, stochastic):
    x = torch.randn(130, 300, generator=torch.Generator().manual_seed(0)).bfloat16() * torch.logspace(-20, 10, 300)
    x[0, 0], x[1, 1], x[:, 2] = torch.nan, 2.0**-130, 0.0
    found = []
    for t in (x, x.cuda()):
        noise = nvfp4.noise_of(t, torch.arange(130, device=t.device)) if stochastic else None
        codes, scales, amax = nvfp4.quantize(t, axis, noise)
        found.append((codes.cpu(), scales.view(torch.uint8).cpu(), amax.cpu(), nvfp4.dequantize(codes, scales, amax, axis).cpu()))
    assert all(same(a, b) for a, b in zip(*found, strict=True))
    a = torch.randint(-4, 5, (64, 40)).bfloat16()  # so that sums are exact in any order
    assert torch.equal(nvfp4.rotate(a), nvfp4.rotate(a.cuda()).cpu())


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block", "fp8_current"])
def test_emulated_experts_on_the_gpu_agree_with_the_cpu(kind):
    from torch import nn

    from bmoe.model.experts import build_experts
    from bmoe.precision.emulate import emulate
    from bmoe.recipe import PrecisionSection

    g = torch.Generator().manual_seed(0)
    x, ids = torch.randn(200, 128, generator=g).bfloat16(), torch.randint(0, 4, (200, 2), generator=g)
    ids[-9:] = 4
    weights = torch.rand(200, 2, generator=g)
    results = []
    for device in ("cpu", "cuda"):
        experts = build_experts("grouped", 4, 128, 96)
        torch.manual_seed(1)
        experts.reset_parameters()
        holder = nn.Module()
        holder.blocks = nn.ModuleList([experts.bfloat16().to(device)])
        emulate(holder, PrecisionSection(kind=kind, emulate=True))
        inp = x.detach().to(device).clone().requires_grad_()
        y = experts(inp, ids.to(device), weights.to(device))
        y.float().square().sum().backward()
        results.append([t.float().cpu() for t in (y, inp.grad, experts.gate_up.grad, experts.down.grad)])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 0.02 * a.norm()
    assert not results[1][0][-9:].any() and not results[1][1][-9:].any()


def test_emulation_compiles_in_one_graph_and_costs_less_than_twice_bf16():
    from torch import nn

    from bmoe.model.experts import build_experts
    from bmoe.precision.emulate import emulate
    from bmoe.recipe import PrecisionSection

    T, D, F, E = 16384, 1280, 3584, 8
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(T, D, generator=g, device="cuda").bfloat16().requires_grad_()
    ids = torch.randint(0, E, (T, 2), generator=g, device="cuda")
    weights = torch.rand(T, 2, generator=g, device="cuda")

    def milliseconds(low):
        experts = build_experts("grouped", E, D, F).cuda().bfloat16()
        if low:
            holder = nn.Module()
            holder.blocks = nn.ModuleList([experts])
            emulate(holder, PrecisionSection(kind="mxfp8", emulate=True))
        step = torch.compile(experts, fullgraph=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(13):
            if i == 3:
                start.record()
            step(x, ids, weights).sum().backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 10

    plain, emulated = milliseconds(False), milliseconds(True)
    print(f"experts forward + backward: bf16 {plain:.2f} ms, emulated mxfp8 {emulated:.2f} ms")
    assert emulated < 2.5 * plain


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_a_recording_of_emulated_experts_gives_the_bits_of_eager_ones(kind):
    """Recorded with one routing and replayed with another: whatever waited for the device would have ended the recording."""
    from torch import nn

    from bmoe.model.experts import build_experts
    from bmoe.precision.emulate import emulate
    from bmoe.recipe import PrecisionSection

    T, D, F, E = 1000, 320, 448, 8
    g = torch.Generator("cuda").manual_seed(0)
    torch.manual_seed(1)
    experts = build_experts("grouped", E, D, F)
    experts.reset_parameters()
    holder = nn.Module()
    holder.blocks = nn.ModuleList([experts.bfloat16().cuda()])
    emulate(holder, PrecisionSection(kind=kind, emulate=True))

    def batch(used):
        x = torch.randn(T, D, generator=g, device="cuda").bfloat16()
        ids = torch.randint(0, used, (T, 2), generator=g, device="cuda")
        ids[-9:] = E
        return x, ids, torch.rand(T, 2, generator=g, device="cuda")

    def step(x, ids, weights):
        inputs = x.detach().requires_grad_(), experts.gate_up, experts.down
        y = experts(inputs[0], ids, weights)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)

    first, second = batch(E), batch(3)  # experts without a row in the second
    held = [t.clone() for t in first]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = step(*held)
    for inputs in (second, first):
        for place, value in zip(held, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        expected = step(*inputs)
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(recorded, expected, strict=True))
        assert expected[0].any()


@pytest.mark.parametrize("kind", ["mxfp8", "fp8_current", "nvfp4"])
def test_replayed_emulated_training_equals_eager(kind):
    from bmoe import recipe as recipes
    from bmoe.data.alphabet import alphabet
    from bmoe.data.loader import TrainingLoader
    from bmoe.data.sampler import Position
    from bmoe.jobs.train import build
    from bmoe.parallel.world import World
    from bmoe.profiling import open_data
    from bmoe.training import setup
    from bmoe.training.step import Stepper

    def train(graphs):
        moe = {"experts": 8, "top_k": 2, "expert_width": 256}
        recipe = recipes.validate(
            {
                "data": {"path": "/nonexistent", "max_length": 512, "tokens_per_batch": 4096},
                "model": {"layers": 2, "width": 256, "heads": 4, "moe": moe}, "precision": {"kind": kind, "emulate": True},
                "backend": {"graphs": graphs, "compile": False}, "training": {"steps": 100, "tokens_per_step": 8192},
            }
        )  # fmt: skip
        world = World(torch.device("cuda", 0))
        resolved, reasons = setup.resolve(recipe, world)
        assert resolved.backend.graphs is (graphs is not False), reasons
        stepper = Stepper(resolved, *build(resolved, alphabet("protein"), world), world.device)
        found = []
        with TrainingLoader(open_data(resolved)[0], resolved, Position(0, 0), pin=True) as loader:
            for _ in range(8):
                batches = loader.next().batches
                totals = torch.tensor([sum(b.targets for b in batches), sum(int(b.real_tokens) for b in batches)])
                loss = sum(float(stepper.backward(batch, totals).loss) for batch in batches)
                found.append((loss, float(stepper.update(1e-5))))
        assert graphs is False or stepper.graphs.update_graph is not None
        return zip(*found, strict=True)

    (eager_losses, eager_norms), (losses, norms) = train(False), train("auto")
    assert list(losses) == pytest.approx(list(eager_losses), rel=2e-3)  # attention's backward adds in any order
    assert list(norms) == pytest.approx(list(eager_norms), rel=2e-2)
