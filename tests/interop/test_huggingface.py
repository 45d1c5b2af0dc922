"""Exported folders in transformers: logits, tokenizer, pipeline, and the way back."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bmoe.errors import RequestError, RunError
from bmoe.interop.files import write_weights
from bmoe.interop.hub.modeling_bmoe import BmoeConfig, BmoeForCausalLM, BmoeForMaskedLM
from bmoe.interop.huggingface import export, load_pretrained, pack, verify
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection

MIXTRAL = {"kind": "decoder", "kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "expert_width": 48}}
SHAPES = {
    "Mixtral": MIXTRAL,
    "Mixtral, untied, DNA": MIXTRAL | {"tie_head": False, "letters": "dna"},
    "encoder MoE": {"moe": {"experts": 4, "top_k": 2, "expert_width": 48}},
    "encoder, every option": {
        "layers": 3, "norm": "layernorm", "bias": True, "qk_norm": True, "tie_head": False, "kv_heads": 1, "ffn": "gelu",
        "moe": {"experts": 6, "top_k": 2, "expert_width": 16, "shared_experts": 2, "dense_layers": 1, "score": "sigmoid",
                "groups": 3, "groups_kept": 2, "normalize_weights": False},
    },
    "encoder, group-limited softmax": {"moe": {"experts": 6, "top_k": 2, "expert_width": 16, "groups": 3, "groups_kept": 2}},
    "dense ESM-2 shape": {"norm": "layernorm", "ffn": "gelu", "bias": True},
    "no token dropout": {"token_dropout": False},
    "decoder with a shared expert": MIXTRAL | {"moe": MIXTRAL["moe"] | {"shared_experts": 1}},
    "dense decoder": {"kind": "decoder", "tie_head": False},
}  # fmt: skip


def load(folder, section, **options):
    """The exported model. The shipped modelling file is used in place here; `verify` and the test without bmoe load its copy."""
    if (folder / "modeling_bmoe.py").is_file():
        auto = BmoeForMaskedLM if section.kind == "encoder" else BmoeForCausalLM
    else:
        auto = transformers.MixtralForCausalLM
    return auto.from_pretrained(folder, **options).eval()


def tokens(names, text):
    return torch.tensor([names.cls_id, *names.encode(text.encode()).tolist(), names.eos_id])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_and_round_trip_is_bitwise(shape, make, sequences, tmp_path):
    model, recipe, names = make(**shape)
    if recipe.model.kind == "encoder":
        for layer in model.moe_layers:
            model.blocks[layer].ffn.router.selection_bias.normal_(0.0, 0.1)
    facts = export(model, recipe, tmp_path / "out", names)
    is_mixtral = shape in (SHAPES["Mixtral"], SHAPES["Mixtral, untied, DNA"])
    assert facts["own_code"] != is_mixtral and (facts["architecture"] == "MixtralForCausalLM") == is_mixtral

    rows = [tokens(names, text) for text in sequences]
    if recipe.model.kind == "encoder":
        for row in rows:
            row[3::7] = names.mask_id
    ours = model(**pack(rows)).logits.split([len(row) for row in rows])
    other = load(tmp_path / "out", recipe.model, dtype=torch.float32)
    for side in ("right", "left"):
        padded = torch.full((len(rows), 80), names.pad_id)
        mask = torch.zeros_like(padded)
        for i, row in enumerate(rows):
            place = slice(0, len(row)) if side == "right" else slice(80 - len(row), 80)
            padded[i, place], mask[i, place] = row, 1
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_mixtral else {}
        with torch.no_grad():
            theirs = other(input_ids=padded, attention_mask=mask, **positions).logits
        for i, expected in enumerate(ours):
            assert expected.std() > 0.3
            torch.testing.assert_close(theirs[i][mask[i].bool()], expected, rtol=0, atol=1e-4)

    weights, keys = load_pretrained(tmp_path / "out")
    assert ModelSection(**keys) == recipe.model or (is_mixtral and keys["moe"].items() <= recipe.model.moe.model_dump().items())
    state = model.state_dict()
    assert weights.keys() == state.keys()
    for name, value in state.items():
        assert weights[name].dtype == value.dtype and torch.equal(weights[name], value), name


@pytest.mark.parametrize("name", ["Mixtral", "encoder MoE", "encoder, every option", "dense ESM-2 shape", "dense decoder"])
def test_bf16_logits_stay_near(name, make, sequences, tmp_path):
    """Theirs computes in bf16, ours in fp32 with the same weights: logits of a position within 2e-2 of their norm in the middle and
    3e-2 for nine of ten; of a position that routes otherwise nothing is said."""
    model, recipe, names = make(**SHAPES[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    export(model, recipe, tmp_path / "out", names)
    other = load(tmp_path / "out", recipe.model, dtype=torch.bfloat16)
    rows = [tokens(names, text) for text in sequences[:3]]
    with torch.no_grad():
        theirs = torch.cat([other(input_ids=row[None]).logits[0].float() for row in rows])
    ours = model(**pack(rows)).logits
    error = (theirs - ours).norm(dim=1) / ours.norm(dim=1)
    assert error.median() < 2e-2 and error.quantile(0.9) < 3e-2
    if recipe.model.kind == "encoder":
        kept = {n for n, t in other.state_dict().items() if t.dtype == torch.float32}
        assert all("router" in n or "rotary" in n for n in kept)
        assert any("router.weight" in n for n in kept) == (recipe.model.moe is not None)
        assert other.bmoe.rotary.inverse_frequency.dtype == torch.float32


def test_mixed_dtypes_survive(make, tmp_path):
    """bf16 matrices beside fp32 routers and norms, as in training; into a folder that exists and is empty."""
    (tmp_path / "out").mkdir()
    model, recipe, names = make(**SHAPES["encoder MoE"])
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "router" not in name:
            parameter.data = parameter.data.bfloat16()
    export(model, recipe, tmp_path / "out", names)
    weights, _ = load_pretrained(tmp_path / "out")
    assert all(torch.equal(weights[n], v) and weights[n].dtype == v.dtype for n, v in model.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_mixtral_names_written_by_transformers_are_read(make, tmp_path):
    model, recipe, names = make(**MIXTRAL)
    export(model, recipe, tmp_path / "out", names)
    other = load(tmp_path / "out", recipe.model)
    other.save_pretrained(tmp_path / "per_expert")
    fused = dict(other.state_dict())
    (tmp_path / "fused").mkdir()
    write_weights({n: t.clone() for n, t in fused.items() if n != "lm_head.weight"}, tmp_path / "fused")
    other.config.save_pretrained(tmp_path / "fused")
    for folder in ("per_expert", "fused"):
        weights, _ = load_pretrained(tmp_path / folder)
        for name, value in model.state_dict().items():
            assert torch.equal(weights[name], value), (folder, name)


WITHOUT_BMOE = """
import sys
sys.modules["bmoe"] = None
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
best = fill("MKT<mask>LLG", top_k=5)
assert len(best) == 5 and all(len(b["token_str"]) >= 1 for b in best), best
assert best[0]["sequence"].startswith("MKT"), best
stack = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
batch = tokenizer(["MKTLLG", "MK"], return_tensors="pt", padding=True)
out = stack(**batch, output_hidden_states=True, output_attentions=True)
assert out.last_hidden_state.shape == (2, 8, 32) and len(out.hidden_states) == 3 and len(out.attentions) == 2
assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, 4, 8))
assert torch.equal(stack.embedding, model.bmoe.embedding)
print("fine")
"""


def test_folder_works_without_bmoe(make, tmp_path):
    model, recipe, names = make(**SHAPES["encoder MoE"])
    export(model, recipe, tmp_path / "out", names)
    done = subprocess.run([sys.executable, "-c", WITHOUT_BMOE, tmp_path / "out"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("name", ["Mixtral", "dense decoder"])
def test_decoders_generate(name, make, tmp_path):
    model, recipe, names = make(**SHAPES[name])
    export(model, recipe, tmp_path / "out", names)
    other = load(tmp_path / "out", recipe.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    prompt = tokenizer("MKTL", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [[0, *names.encode(b"MKTL").tolist()]]
    out = other.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)[0]
    sequence = prompt["input_ids"][0]
    for _ in range(4):
        sequence = torch.cat((sequence, model(**pack([sequence])).logits[-1:].argmax(-1)))
    assert torch.equal(out, sequence)


def test_loss_of_the_exported_models(make, tmp_path):
    for name in ("encoder MoE", "dense decoder"):
        model, recipe, names = make(**SHAPES[name])
        export(model, recipe, tmp_path / name, names)
        other, row = load(tmp_path / name, recipe.model), tokens(names, "MKTLLG")
        logits = model(**pack([row])).logits
        labels = row.clone()
        labels[:3] = -100
        expected = logits[3:] if recipe.model.kind == "encoder" else logits[2:-1]
        loss = torch.nn.functional.cross_entropy(expected, row[3:])
        torch.testing.assert_close(other(input_ids=row[None], labels=labels[None]).loss, loss, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inside", ["checkpoints/latest", "__0_0.distcp"])
def test_a_run_where_an_export_is_wanted_is_told_apart(tmp_path, inside):
    (tmp_path / inside).parent.mkdir(exist_ok=True)
    (tmp_path / inside).touch()
    with pytest.raises(RequestError, match=f"bmoe export {tmp_path} --to DIR"):
        load_pretrained(tmp_path)


def test_unknown_architectures_and_folders_are_refused(make, tmp_path):
    with pytest.raises(RequestError, match="does not exist"):
        load_pretrained(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="holds no weights"):
        load_pretrained(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(RequestError, match="model_type bert"):
        load_pretrained(tmp_path / "empty")
    write_weights({"x": torch.zeros(1)}, tmp_path)
    with pytest.raises(RequestError, match="no ESM-2 checkpoint"):
        load_pretrained(tmp_path)
    model, recipe, names = make()
    with pytest.raises(RequestError, match="not empty"):
        export(model, recipe, tmp_path / "empty", names)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        export(model, recipe, tmp_path / "file" / "out", names)


def test_shards_and_their_absence(make, tmp_path):
    model, _, _ = make()
    weights = model.state_dict()
    write_weights(weights, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights) and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bmoe", "model": model.section.model_dump()}))
    again, _ = load_pretrained(tmp_path)
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    (tmp_path / sorted(index["weight_map"].values())[0]).unlink()
    with pytest.raises(RequestError, match="lacks model-00001"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["Mixtral", "encoder MoE", "Mixtral, untied, DNA", "dense decoder"])
def test_verify(name, make, tmp_path):
    model, recipe, names = make(**SHAPES[name])
    export(model, recipe, tmp_path / "out", names)
    facts = verify(tmp_path / "out")
    assert facts["max_difference"] <= facts["tolerance"] == 1e-4 and facts["sequences"] == 8 and facts["tokens"] > 40


def test_verify_sees_a_wrong_modelling_file(make, tmp_path):
    model, recipe, names = make(**SHAPES["encoder MoE"])
    export(model, recipe, tmp_path / "wrong", names)
    file = tmp_path / "wrong" / "modeling_bmoe.py"
    file.write_text(file.read_text().replace("high * cos + low * sin", "high * cos - low * sin"))
    with pytest.raises(RunError, match="disagree"):
        verify(tmp_path / "wrong")


def test_modelling_file_and_model_agree_on_the_flagship_shape():
    """By key and shape, on the meta device: the shipped file builds what the recipe's model has."""
    section = ModelSection()
    with torch.device("meta"):
        ours = Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts="loop")).state_dict()
        theirs = BmoeForMaskedLM(BmoeConfig(model=section.model_dump())).state_dict()
    assert {n.removeprefix("bmoe."): t.shape for n, t in theirs.items()} == {n: t.shape for n, t in ours.items()}


def _cut(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def _without(name):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors")

    return change


def _half(name):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {name: weights[name][::2].clone()}, folder / "model.safetensors")

    return change


def _config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


DAMAGES = [
    ("Mixtral", _cut, "model.safetensors cannot be read"),
    ("Mixtral", lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    ("Mixtral", lambda folder: (folder / "config.json").write_text("[]"), "no object"),
    ("Mixtral", _config(hidden_size=None), "lacks hidden_size"),
    ("Mixtral", _without("model.norm.weight"), "lacks model.norm.weight"),
    ("Mixtral", _half("model.layers.0.self_attn.o_proj.weight"), r"blocks.0.attention.output.weight has the shape \(16, 32\)"),
    ("encoder MoE", _without("bmoe.final_norm.weight"), "final_norm.weight has the shape None"),
    ("encoder MoE", _config(model=None), "config.json: model: "),
    ("encoder MoE", _config(model={"widht": 3}), "config.json: model.widht: "),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_damaged_folders_are_told_in_a_sentence(name, damage, words, make, tmp_path):
    model, recipe, names = make(**SHAPES[name])
    export(model, recipe, tmp_path / "folder", names)
    load_pretrained(tmp_path / "folder")
    damage(tmp_path / "folder")
    with pytest.raises(RequestError, match=words):
        load_pretrained(tmp_path / "folder")
