"""The recipe schema: every fault is found, together, with its place and the way out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe import recipe as recipes
from bmoe.recipe import Recipe, RecipeError

SHIPPED = sorted(recipes.shipped_directory().glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def faults(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipes.load(write(tmp_path, text), list(overrides))
    return caught.value.faults


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_recipes_load_and_divide_by_eight_ranks(path):
    recipe = recipes.load(path)
    assert recipe.name == path.stem
    batches = recipe.training.tokens_per_step // recipe.data.tokens_per_batch
    assert batches % (4 if path.stem == "esm2_moe_tiny" else 8) == 0


def test_the_design_ships_six_recipes():
    assert {p.stem for p in SHIPPED} == {
        "esm2_moe_tiny",
        "esm2_moe_8m",
        "esm2_dense_8m",
        "esm2_moe",
        "protein_moe_fine",
        "genome_mixtral",
    }


def test_unknown_key_names_line_and_nearest_key(tmp_path):
    (fault,) = faults(tmp_path, "name: x\ntraining:\n  stpes: 3\n")
    assert "r.yaml:3" in fault and "training.stpes" in fault and "did you mean training.steps?" in fault


def test_key_of_another_section_is_found(tmp_path):
    (fault,) = faults(tmp_path, "model: {top_k: 2}\n")
    assert "did you mean model.moe.top_k?" in fault


def test_a_misspelt_key_is_one_fault(tmp_path):
    """The default that stands in for it breaks a rule, which is not the user's doing."""
    (fault,) = faults(tmp_path, "model: {layers: 2, widht: 64, heads: 3}\n")
    assert fault.endswith("model.widht is not a key of the recipe; did you mean model.width?")


@pytest.mark.parametrize("written, meant", [("0,001", "0.001"), ("4,5e-4", "0.5e-4")])
def test_a_decimal_comma_is_told_from_a_key(tmp_path, written, meant):
    found = faults(tmp_path, f"optimizer: {{lr: {written}}}\n")
    assert any(f"decimals follow a point and not a comma, as in {meant}" in fault for fault in found), found


def test_numbers_as_people_write_them(tmp_path):
    recipe = recipes.load(write(tmp_path, "optimizer: {lr: 4e-4}\ntraining: {steps: 1e3}\nschedule: {final_fraction: 1E-1}\n"))
    assert recipe.optimizer.lr == 4e-4 and recipe.training.steps == 1000 and recipe.schedule.final_fraction == 0.1
    assert isinstance(recipe.training.steps, int)


@pytest.mark.parametrize("value", ["true", "1.5", "many", "-1", "0", "[1]", "null"])
def test_wrong_type_names_key_and_line(tmp_path, value):
    (fault,) = faults(tmp_path, f"name: x\ntraining:\n  steps: {value}\n")
    assert "r.yaml:3: training.steps" in fault


def test_duplicate_key_is_an_error(tmp_path):
    (fault,) = faults(tmp_path, "model:\n  layers: 2\n  layers: 3\n")
    assert "r.yaml:3" in fault and "model.layers is given twice" in fault


def test_all_faults_are_reported_at_once(tmp_path):
    found = faults(tmp_path, "model: {width: 30, heads: 7, layerz: 2, moe: {experts: 4, top_k: 5}}\nobjective: {kind: clm}\n", "seed=x")
    text = "\n".join(found)
    for part in ("model.width", "layerz", "model.moe.top_k", "objective.kind", "--set seed=x: seed"):
        assert part in text
    assert len(found) == 5


RULES = [
    ("model: {width: 100, heads: 3}", "model.width"),
    ("model: {width: 60, heads: 20}", "model.heads"),
    ("model: {kv_heads: 3}", "model.kv_heads"),
    ("model: {kind: decoder}", "objective.kind"),
    ("model: {init_noise: 0.1}", "model.init_noise"),
    ("objective: {mask_token: 0.8, random_token: 0.3}", "objective.random_token"),
    ("model: {moe: null}\nparallel: {expert: 2}", "parallel.expert"),
    ("model: {moe: null}\nbackend: {recompute: experts}", "backend.recompute"),
    ("data: {max_length: 2}", "data.max_length"),
    ("data: {max_length: 4096, tokens_per_batch: 1024}", "data.max_length"),
    ("training: {tokens_per_step: 100000}", "training.tokens_per_step"),
    ("parallel: {data_shard: 3}", "training.tokens_per_step"),
    ("data: {prepare: {valid_fraction: 0.6, test_fraction: 0.4}}", "data.prepare.valid_fraction"),
    ("data: {prepare: {min_length: 9, max_length: 3}}", "data.prepare.max_length"),
    ("precision: {high_precision_layers: {first: 20, last: 5}}", "precision.high_precision_layers"),
    ("model: {moe: {top_k: 9}}", "model.moe.top_k"),
    ("model: {moe: {top_k: 1}}", "model.moe.normalize_weights"),
    ("model: {layers: 2, moe: {dense_layers: 2}}", "model.moe.dense_layers"),
    ("parallel: {expert: 3}\ntraining: {tokens_per_step: 3145728}", "parallel.expert"),
    ("model: {moe: {groups: 4}}", "model.moe.groups"),
    ("model: {moe: {groups: 3, groups_kept: 1}}", "model.moe.groups"),
    ("model: {moe: {groups: 4, groups_kept: 5}}", "model.moe.groups_kept"),
    ("model: {moe: {groups: 4, groups_kept: 1, top_k: 3}}", "model.moe.top_k"),
    ("model: {ffn: gelu}\nbackend: {experts: triton}", "backend.experts"),
    ("data: {reverse_complement: true}", "data.reverse_complement"),
    ("data: {soft_mask: no_loss}", "data.soft_mask"),
    ("data: {alphabet: dna}", "data.window"),
    ("data: {alphabet: dna, window: 10, window_overlap: 10}", "data.window_overlap"),
    ("data: {alphabet: 'dna-bpe:512', window: 10, reverse_complement: true}", "data.reverse_complement"),
    ("data: {alphabet: rna}", "data.alphabet"),
    ("data: {alphabet: dna, window: 10, sampling: cluster}", "data.sampling"),
    ("precision: {emulate: true}", "precision.emulate"),
    ("precision: {kind: nvfp4}", "precision.kind: nvfp4 is emulated only"),
    ("precision: {kind: nvfp4}\nmodel: {moe: null}", "precision.emulate: true"),
    ("precision: {emulate_linears: true}", "precision.emulate_linears"),
    ("model: {moe: null}\nprecision: {kind: mxfp8, emulate: true}", "precision.emulate"),
    ("model: {moe: null}\nprecision: {kind: mxfp8, emulate: true, emulate_linears: true, statistics_every: 5}", "precision.statistics"),
    ("precision: {statistics_every: 10}", "precision.statistics_every"),
    ("precision: {kind: mxfp8}\nbackend: {experts: loop}", "backend.experts"),
    ("precision: {kind: fp8_row}\nbackend: {experts: te}", "backend.experts"),
    ("precision: {kind: mxfp8, emulate: true}\nbackend: {experts: te}", "backend.experts"),
    ("precision: {kind: mxfp8}\nmodel: {moe: null}", "precision.kind"),
    ("precision: {kind: mxfp8}\nmodel: {moe: {expert_width: 100}}", "model.moe.expert_width"),
    ("name: a b", "name"),
]


@pytest.mark.parametrize("text,key", RULES, ids=[f"{i}-{k}" for i, (_, k) in enumerate(RULES)])
def test_every_rule_fires_alone_with_its_key_and_place(tmp_path, text, key):
    (fault,) = faults(tmp_path, text + "\n")
    assert fault.startswith(str(tmp_path)) and f" {key}" in fault


def test_overrides_win_and_name_themselves(tmp_path):
    path = write(tmp_path, "model: {layers: 2}\n")
    assert recipes.load(path, ["model.layers=3", "model.moe=null", "optimizer.betas=[0.9,0.95]"]).model.layers == 3
    assert faults(tmp_path, "name: x\n", "model.layers") == ["--set model.layers: an override is section.key=value"]


def test_an_override_that_breaks_a_rule_of_another_key_is_named(tmp_path):
    (fault,) = faults(tmp_path, "model: {width: 1280}\n", "model.heads=3")
    assert fault.startswith("--set model.heads=3: model.width")


def test_an_empty_recipe_starts_nothing(tmp_path):
    assert "is empty" in faults(tmp_path, "\n")[0]


def test_not_yaml_names_the_line(tmp_path):
    (fault,) = faults(tmp_path, "name: x\nmodel: {layers: 2\n")
    assert "r.yaml:" in fault and "not YAML" in fault


def test_missing_file_and_shipped_names(tmp_path):
    with pytest.raises(RecipeError, match="cannot read"):
        recipes.load(tmp_path / "no.yaml")
    path, shipped = recipes.find("somewhere/esm2_moe.yaml")
    assert shipped and path.name == "esm2_moe.yaml"
    with pytest.raises(RecipeError, match="did you mean esm2_moe_tiny"):
        recipes.find("esm2_moe_tinny")


def test_fasta_is_relative_to_the_recipe(tmp_path):
    assert recipes.load(write(tmp_path, "data: {fasta: x.fasta}\n")).data.fasta == str(tmp_path / "x.fasta")


@given(
    st.builds(
        lambda lr, steps, moe, path, compile_: recipes.validate(
            {
                "optimizer": {"lr": lr},
                "training": {"steps": steps},
                "model": {"moe": moe},
                "data": {"path": path},
                "backend": {"compile": compile_},
            }
        ),
        st.floats(1e-12, 1e3),
        st.integers(1, 10**9),
        st.sampled_from([None, {"experts": 16}]),
        st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1),
        st.sampled_from(["auto", True, False]),
    )
)
def test_dump_and_load_are_inverse(tmp_path_factory, recipe):
    path = tmp_path_factory.mktemp("r") / "r.yaml"
    path.write_text(recipes.dump(recipe, {"model.layers": "why not"}))
    assert recipes.load(path) == recipe


def test_differences_name_keys():
    other = recipes.validate({"model": {"layers": 3}, "seed": 1})
    assert recipes.differences(Recipe(), other) == ["model.layers", "seed"]


@pytest.mark.parametrize(
    "text", ["training.steps: 5", "training: {'moe.x': 3}", "? [a]\n: 3", "a: &a [*a]", "name: 2020-13-45", "model: {moe: {1: 2}}"]
)
def test_strange_keys_and_values_end_in_a_sentence(tmp_path, text):
    assert faults(tmp_path, text + "\n")


@pytest.mark.parametrize("text", ["optimizer: {lr: true}", "optimizer: {lr: '4e-4'}", "model: {bias: 1}", "model: {rope_base: .inf}",
                                  "optimizer: {betas: [0.9]}", "parallel: {data_shard: foo}"])  # fmt: skip
def test_types_are_not_guessed(tmp_path, text):
    (fault,) = faults(tmp_path, text + "\n")
    assert " should be " in fault
