"""The one recipe schema of all commands: sections, defaults, every cross-field rule, `load` and `dump`.

A recipe is YAML. It is checked whole before anything starts and all faults are reported together, each with its place.
Hardware is no business of the schema: every recipe loads on every machine, and `auto` values are resolved by the
commands when they start. This module imports nothing else of bmoe.
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator


def _whole(value: Any) -> Any:
    """People write 5e5 for a number of steps: a float that is whole is an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1, strict=True)]
Natural = Annotated[int, BeforeValidator(_whole), Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class RecipeError(ValueError):
    """A recipe cannot be used. `faults` holds one sentence each, with file:line and section.key."""

    def __init__(self, faults: list[str]):
        self.faults = faults
        super().__init__("\n".join(faults))


class Section(BaseModel):
    """Base of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class PrepareSection(Section):
    """Options of `bmoe prepare` that `bmoe train` uses when it prepares `data.fasta` itself; the flags' names."""

    valid_fraction: Fraction = Field(0.005, description="share of sequences (or clusters) held out for validation")
    test_fraction: Fraction = Field(0.0, description="share of sequences (or clusters) held out for a final test")
    clusters: str | None = Field(None, description="TSV of member and representative, or `uniref` to read them off UniRef headers")
    dedup: bool = Field(True, description="keep the first of exactly equal sequences")
    min_length: Natural = Field(2, description="shortest sequence kept, in residues")
    max_length: Positive | None = Field(None, description="longest sequence kept, in residues; null keeps all")
    on_invalid: Literal["unknown", "drop", "error"] = Field(
        "unknown", description="a letter outside the alphabet becomes the unknown token, drops its record, or stops the run"
    )
    internal_stop: Literal["unknown", "drop", "error"] = Field("unknown", description="the same for a `*` inside a sequence")
    gaps: Literal["remove", "invalid"] = Field("remove", description="`-` and `.` are taken out, or count as invalid letters")
    n_runs: Literal["split", "keep"] = Field("split", description="DNA: cut records at long runs of N, or leave them")
    keep_headers: bool = Field(True, description="store the header lines, for `bmoe eval --by`")


class DataSection(Section):
    """Where the sequences are and how batches are cut from them."""

    path: str = Field("data/uniref50", description="folder of shards, relative to the working directory")
    fasta: str | None = Field(None, description="FASTA prepared into `path` when `path` has no shards; relative to the recipe file")
    alphabet: str = Field("protein", description="`protein` (ESM-2's 33 tokens), `dna`, or `dna-bpe:N`")
    max_length: Positive = Field(1024, description="longest crop in token slots, `<cls>` and `<eos>` included")
    tokens_per_batch: Positive = Field(16384, description="token slots of one forward pass on one rank, specials included")
    sampling: Literal["sequence", "cluster"] = Field(
        "sequence", description="an epoch is every sequence once, or one random member of every cluster"
    )
    window: Positive = Field(1024, description="DNA: records longer than this count as consecutive windows of this many tokens")
    window_overlap: Natural = Field(0, description="DNA: tokens that consecutive windows share")
    reverse_complement: bool = Field(False, description="DNA: read every other window, by chance, from the other strand")
    soft_mask: Literal["ignore", "no_loss"] = Field(
        "ignore", description="DNA in lower case: treated as any other (`ignore`), or never a target of the loss (`no_loss`)"
    )
    prepare: PrepareSection = Field(default_factory=PrepareSection)

    @field_validator("alphabet")
    @classmethod
    def _alphabet(cls, value: str) -> str:
        if value in ("protein", "dna") or re.fullmatch(r"dna-bpe:[1-9]\d*", value):
            return value
        raise ValueError("should be protein, dna or dna-bpe:N (N is the vocabulary size)")


class MoESection(Section):
    """The Mixture-of-Experts feed-forward layers."""

    experts: Positive = Field(8, description="routed experts of a layer")
    top_k: Positive = Field(2, description="experts that every token visits")
    expert_width: Positive = Field(3584, description="hidden width F of one expert")
    shared_experts: Natural = Field(0, description="experts that every token visits besides, as one expert of that multiple of the width")
    dense_layers: Natural = Field(0, description="how many of the first layers keep a dense feed-forward")
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="how router logits become scores")
    normalize_weights: bool = Field(True, description="divide the weights of the chosen experts by their sum")
    groups: Positive | None = Field(None, description="group-limited routing: number of equal groups of experts")
    groups_kept: Positive | None = Field(None, description="group-limited routing: groups a token may choose from")
    balance_loss: NonNegative = Field(0.01, description="coefficient of the load balance loss, per layer")
    z_loss: NonNegative = Field(0.001, description="coefficient of the router z-loss, per layer")
    bias_update: NonNegative = Field(0.0, description="rate of the aux-loss-free balance bias, once per optimizer step; 0 is off")
    jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="multiplicative noise on router inputs in training")


class ModelSection(Section):
    """The transformer."""

    kind: Literal["encoder", "decoder"] = Field("encoder", description="bidirectional or causal attention")
    layers: Positive = Field(24, description="transformer layers")
    width: Positive = Field(1280, description="width D of the residual stream")
    heads: Positive = Field(20, description="attention heads")
    kv_heads: Positive | None = Field(None, description="key and value heads (grouped-query attention); null: as many as `heads`")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="normalisation before attention, feed-forward and head")
    ffn: Literal["swiglu", "gelu"] = Field("swiglu", description="feed-forward of dense layers and experts")
    ffn_width: Positive | None = Field(None, description="width of a dense feed-forward; null: 4 D (gelu), 8/3 D in 64s (swiglu)")
    bias: bool = Field(False, description="biases in linear layers")
    qk_norm: bool = Field(False, description="normalise queries and keys per head")
    rope_base: Annotated[float, Field(gt=0.0)] = Field(10000.0, description="base of the rotary position embedding")
    token_dropout: bool = Field(True, description="encoders: ESM-2's rescaling of embeddings by the share of `<mask>` tokens")
    tie_head: bool = Field(True, description="the output projection shares the embedding's weights")
    init_from: str | None = Field(None, description="folder to start from: one that `bmoe export` wrote, or dense ESM-2 weights to upcycle")
    moe: MoESection | None = Field(default_factory=MoESection, description="null is the dense model")


class ObjectiveSection(Section):
    """What is predicted."""

    kind: Literal["mlm", "clm"] = Field("mlm", description="masked tokens (encoder) or the next token (decoder)")
    mask_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.15, description="mlm: share of residues that become targets")
    mask_token: Fraction = Field(0.8, description="mlm: share of targets shown as `<mask>`")
    random_token: Fraction = Field(0.1, description="mlm: share of targets shown as a random residue; the rest is shown as it is")


class HighPrecisionSection(Section):
    """Layers kept in bf16 under low precision."""

    first: Natural = Field(0, description="how many of the first layers")
    last: Natural = Field(0, description="how many of the last layers")


class PrecisionSection(Section):
    """Arithmetic of the matrix products. Router and losses are always fp32, optimizer masters too."""

    kind: Literal["fp32", "bf16", "fp8_current", "fp8_block", "fp8_delayed", "mxfp8"] = Field("bf16", description="format of GEMM inputs")
    high_precision_layers: HighPrecisionSection = Field(default_factory=HighPrecisionSection)
    emulate: bool = Field(False, description="round GEMM inputs to `kind` in software, on any machine: for convergence, not speed")
    statistics_every: Positive | None = Field(None, description="steps between quantisation statistics in the metrics; null is off")


class BackendSection(Section):
    """Which implementation runs; results agree to rounding."""

    experts: Literal["auto", "loop", "grouped", "te", "triton"] = Field("auto", description="implementation of the experts")
    attention: Literal["auto", "sdpa", "varlen"] = Field("auto", description="per-sequence SDPA, or torch's variable-length flash")
    compile: Literal["auto", True, False] = Field("auto", description="torch.compile of the layers; auto: GPU yes, CPU no")
    recompute: Literal["none", "experts", "full"] = Field("none", description="activations computed again in the backward pass")


class ParallelSection(Section):
    """World size = data_replicate x data_shard x expert; every rank has batches of its own."""

    data_replicate: Positive = Field(1, description="copies of the whole model")
    data_shard: Literal["auto"] | Positive = Field("auto", description="ranks that share the parameters (FSDP2); auto: what is left")
    expert: Positive = Field(1, description="ranks that share the experts (expert parallelism)")


class OptimizerSection(Section):
    """AdamW with decoupled weight decay on matrices only."""

    kind: Literal["adamw"] = Field("adamw", description="the optimizer")
    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = Field(4.0e-4, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="moment decay rates")
    eps: Annotated[float, Field(gt=0.0)] = Field(1.0e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.01, description="decoupled weight decay of matrices")
    clip_norm: Annotated[float, Field(gt=0.0)] | None = Field(1.0, description="largest global gradient norm; null does not clip")
    state_dtype: Literal["fp32", "bf16"] = Field("fp32", description="format of the two moments")


class ScheduleSection(Section):
    """Learning rate: linear warm-up to the peak, then decay to `final_fraction` of it at the last step."""

    warmup_steps: Natural = Field(2000, description="steps of linear warm-up; may exceed the run")
    decay: Literal["linear", "cosine", "constant"] = Field("linear", description="shape after the warm-up")
    final_fraction: Fraction = Field(0.1, description="learning rate at the end, as a share of the peak")


class TrainingSection(Section):
    """How long, and how often it is checked."""

    steps: Positive = Field(500_000, description="optimizer steps")
    tokens_per_step: Positive = Field(2_097_152, description="token slots of one optimizer step over all ranks")
    validate_every: Positive = Field(1000, description="steps between validations; the last step always is one")
    validation_tokens: Positive = Field(1_048_576, description="token slots of one validation")
    max_skipped_steps: Positive = Field(10, description="non-finite steps in a row that stop the run")


class CheckpointSection(Section):
    """When the run's state is saved."""

    every: Positive = Field(1000, description="steps between checkpoints; the last step always is one")
    keep: Positive = Field(3, description="newest checkpoints kept")
    async_: bool = Field(True, alias="async", description="write in the background while training goes on")


class LoggingSection(Section):
    """Where the numbers go; RUN/metrics.jsonl always has them."""

    every: Positive = Field(10, description="steps between lines; the first and the last step always are")
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra `track`)")
    wandb: str | None = Field(None, description="Weights & Biases project (extra `track`)")


class Recipe(Section):
    """A whole recipe."""

    name: str = Field("esm2_moe", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run's folder, runs/NAME")
    seed: Natural = Field(0, description="of initial weights, order, crops and masks")
    data: DataSection = Field(default_factory=DataSection)
    model: ModelSection = Field(default_factory=ModelSection)
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    backend: BackendSection = Field(default_factory=BackendSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)


RULE_BLOCK = 32  # MXFP8 scales blocks of 32 along the contraction, so every GEMM dimension must be a multiple.


def broken_rules(r: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (section.key, sentence) for every cross-field rule that `r` breaks."""
    m, moe, d, p = r.model, r.model.moe, r.data, r.parallel
    if m.width % m.heads:
        yield "model.width", f"{m.width} is not a multiple of model.heads = {m.heads}"
    elif (m.width // m.heads) % 2:
        yield "model.heads", f"head dimension {m.width // m.heads} is odd, and rotary embeddings turn pairs; choose another number"
    if m.kv_heads and m.heads % m.kv_heads:
        yield "model.kv_heads", f"{m.kv_heads} does not divide model.heads = {m.heads}"
    if (r.objective.kind == "mlm") != (m.kind == "encoder"):
        fit = "an encoder" if r.objective.kind == "mlm" else "a decoder"
        yield "objective.kind", f"{r.objective.kind} needs {fit}, and model.kind is {m.kind}"
    if r.objective.mask_token + r.objective.random_token > 1.0 + 1e-9:
        yield "objective.random_token", "mask_token + random_token exceed 1"
    if moe:
        yield from _moe_rules(r, moe)
    elif p.expert > 1:
        yield "parallel.expert", f"{p.expert} ranks cannot share the experts of a dense model (model.moe is null); set it to 1"
    if moe is None and r.backend.recompute == "experts":
        yield "backend.recompute", "`experts` needs a model with experts (model.moe is null); use none or full"
    if d.max_length < 3:
        yield "data.max_length", "needs at least 3 slots: <cls>, one residue, <eos>"
    if d.max_length > d.tokens_per_batch:
        yield "data.max_length", f"{d.max_length} exceeds data.tokens_per_batch = {d.tokens_per_batch}, so a crop would fit no batch"
    known = p.data_replicate * p.expert * (1 if p.data_shard == "auto" else p.data_shard)
    if r.training.tokens_per_step % (d.tokens_per_batch * known):
        yield "training.tokens_per_step", (
            f"{r.training.tokens_per_step} is not a multiple of data.tokens_per_batch x world = {d.tokens_per_batch} x {known}"
        )
    yield from _dna_rules(d)
    if d.prepare.valid_fraction + d.prepare.test_fraction >= 1.0:
        yield "data.prepare.valid_fraction", "valid_fraction + test_fraction leave nothing to train on"
    if d.prepare.max_length and d.prepare.max_length < d.prepare.min_length:
        yield "data.prepare.max_length", f"{d.prepare.max_length} is below data.prepare.min_length = {d.prepare.min_length}"
    kept = r.precision.high_precision_layers
    if kept.first + kept.last > m.layers:
        yield "precision.high_precision_layers", f"first + last = {kept.first + kept.last} exceed model.layers = {m.layers}"
    yield from _precision_rules(r)


def _moe_rules(r: Recipe, moe: MoESection) -> Iterator[tuple[str, str]]:
    if moe.top_k > moe.experts:
        yield "model.moe.top_k", f"{moe.top_k} exceeds model.moe.experts = {moe.experts}"
    if moe.top_k == 1 and moe.normalize_weights:
        yield "model.moe.normalize_weights", "with top_k: 1 the only weight becomes 1 and the router learns nothing; set it to false"
    if moe.dense_layers >= r.model.layers:
        yield "model.moe.dense_layers", f"{moe.dense_layers} leaves no MoE layer of {r.model.layers}; a dense model has model.moe: null"
    if moe.experts % r.parallel.expert:
        yield "parallel.expert", f"{r.parallel.expert} does not divide model.moe.experts = {moe.experts}"
    if (moe.groups is None) != (moe.groups_kept is None):
        yield "model.moe.groups", "groups and groups_kept go together; set both or neither"
    elif moe.groups and moe.groups_kept:
        if moe.experts % moe.groups:
            yield "model.moe.groups", f"{moe.groups} does not divide model.moe.experts = {moe.experts}"
        elif moe.groups_kept > moe.groups:
            yield "model.moe.groups_kept", f"{moe.groups_kept} exceeds model.moe.groups = {moe.groups}"
        elif moe.top_k > moe.experts // moe.groups * moe.groups_kept:
            yield "model.moe.top_k", f"{moe.top_k} exceeds the {moe.experts // moe.groups * moe.groups_kept} experts of the kept groups"
    if r.backend.experts in ("te", "triton") and (r.model.ffn != "swiglu" or r.model.bias):
        yield "backend.experts", f"{r.backend.experts} has SwiGLU experts without bias only; use grouped, or ffn: swiglu and bias: false"


def _dna_rules(d: DataSection) -> Iterator[tuple[str, str]]:
    if d.alphabet == "protein":
        if d.reverse_complement:
            yield "data.reverse_complement", "proteins have no other strand; set it to false"
        if d.soft_mask != "ignore":
            yield "data.soft_mask", "lower case marks repeats in DNA only; use ignore"
        return
    if d.window_overlap >= d.window:
        yield "data.window_overlap", f"{d.window_overlap} leaves no progress in a window of {d.window}"
    if d.window > d.max_length - 2:
        yield "data.window", f"{d.window} tokens and the two specials exceed data.max_length = {d.max_length}"
    if d.reverse_complement and d.alphabet != "dna":
        yield "data.reverse_complement", "needs the alphabet dna: BPE tokens have no complement"


def _precision_rules(r: Recipe) -> Iterator[tuple[str, str]]:
    p, moe = r.precision, r.model.moe
    low = p.kind not in ("fp32", "bf16")
    if p.emulate and p.kind not in ("fp8_current", "fp8_block", "mxfp8"):
        yield "precision.emulate", f"{p.kind} has no emulation; use fp8_current, fp8_block or mxfp8, or set it to false"
    if p.statistics_every and not p.emulate:
        yield "precision.statistics_every", "statistics come from the emulation; set precision.emulate: true or leave this null"
    if low and not p.emulate and r.backend.experts not in ("auto", "te"):
        yield "backend.experts", f"{p.kind} runs in Transformer Engine; use te or auto, or precision.emulate: true"
    if low and p.emulate and r.backend.experts not in ("auto", "loop", "grouped"):
        yield "backend.experts", "the emulation runs in loop and grouped; use one of them or auto"
    if low and not p.emulate and moe is None:
        yield "precision.kind", f"{p.kind} is for expert GEMMs, and model.moe is null; use bf16"
    if p.kind == "mxfp8":
        sizes = {"model.width": r.model.width, **({"model.moe.expert_width": moe.expert_width} if moe else {})}
        for key, size in sizes.items():
            if size % RULE_BLOCK:
                yield key, f"{size} is not a multiple of {RULE_BLOCK}, the block of mxfp8"


class _Loader(yaml.SafeLoader):
    """YAML with numbers as people write them: `4e-4` is a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _plain(node: yaml.Node, path: str, where: str, lines: dict[str, str], faults: list[str]) -> Any:
    """Turn a YAML node into plain Python, noting the place of every key and every duplicate key."""
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            full = f"{path}.{key}" if path else key
            place = f"{where}:{key_node.start_mark.line + 1}"
            if key in out:
                faults.append(f"{place}: {full} is given twice; keep one")
            lines[full] = place
            out[key] = _plain(value_node, full, where, lines, faults)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, path, where, lines, faults) for child in node.value]
    return _Loader("").construct_object(node)


def _parse(text: str, where: str, lines: dict[str, str], faults: list[str], path: str = "") -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _plain(node, path, where, lines, faults)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError([f"{place}: this is not YAML ({problem}); check indentation, quotes and brackets"]) from None


def known_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """All `section.key` paths of the schema with their pydantic field, sections included."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        found[key] = field
        sub = section_of(field.annotation)
        if sub:
            found.update(known_keys(sub, key + "."))
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The Section class inside an annotation (`X` or `X | None`), or None."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _nearest(key: str) -> str:
    """Name the nearest known key: a sibling first, else a key of the same name in another section."""
    keys = list(known_keys())
    parent, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return f"; did you mean {siblings[close[0]]}?"
    elsewhere = [k for k in keys if k.rpartition(".")[2] == leaf] or difflib.get_close_matches(key, keys, 1, 0.0)
    return f"; did you mean {elsewhere[0]}?"


def _sentence(error: Any, key: str) -> str:
    """One plain sentence for a pydantic error."""
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    shown = f", not {given!r}" if not isinstance(given, dict | list) else ""
    if kind == "extra_forbidden":
        return f"{key} is not a key of the recipe{_nearest(key)}"
    words = {
        "int_type": "a whole number", "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false",
        "bool_parsing": "true or false", "string_type": "text", "tuple_type": "a list of two numbers",
        "model_type": "a section (a mapping of keys)",
    }
    if kind in words:
        return f"{key} should be {words[kind]}{shown}"
    if kind == "literal_error":
        return f"{key} should be one of {context['expected']}{shown}"
    if kind == "value_error":
        return f"{key} {context['error']}{shown}"
    return f"{key} {error['msg'].removeprefix('Input ').removeprefix('String ')}{shown}"


def _known_path(location: tuple) -> str:
    """The schema key of a pydantic location: list indices and union members are dropped."""
    keys, path = known_keys(), ""
    for part in location:
        step = f"{path}.{part}" if path else str(part)
        if step not in keys and path in keys and section_of(keys[path].annotation) is None:
            break
        if isinstance(part, str) and (step in keys or part == location[-1]):
            path = step
    return path


def validate(values: dict, lines: dict[str, str] | None = None, where: str = "recipe", faults: list[str] | None = None) -> Recipe:
    """Build a Recipe from plain values. Raises RecipeError with every fault: types, unknown keys and broken rules."""
    lines, faults = lines or {}, list(faults or [])

    def place(key: str) -> str:
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return lines.get(key, where)

    bad: set[str] = set()
    while True:
        try:
            recipe = Recipe.model_validate(values)
            break
        except ValidationError as error:
            for item in error.errors():
                key = _known_path(item["loc"])
                if key in bad:
                    continue
                bad.add(key)
                faults.append(f"{place(key)}: {_sentence(item, key)}")
                if not key:
                    raise RecipeError(faults) from None
                _remove(values, key)
    for key, sentence in broken_rules(recipe):
        if not any(name == key or name in sentence for name in bad):
            faults.append(f"{place(key)}: {key}: {sentence}")
    if faults:
        raise RecipeError(faults)
    return recipe


def _remove(values: dict, key: str) -> None:
    """Drop a faulty key so that the rest can still be checked (its default stands in)."""
    *parents, leaf = key.split(".")
    for parent in parents:
        values = values.get(parent) or {}
    values.pop(leaf, None)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides.

    `data.fasta` becomes absolute (it is relative to the recipe file). Raises RecipeError with all faults at once.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError([f"{path}: cannot read the recipe ({error.strerror}); check the path"]) from None
    except UnicodeDecodeError:
        raise RecipeError([f"{path}: the recipe is not UTF-8 text; is it the right file?"]) from None
    lines: dict[str, str] = {}
    faults: list[str] = []
    values = _parse(text, str(path), lines, faults) or {}
    if not isinstance(values, dict):
        raise RecipeError([f"{path}:1: a recipe is a mapping of sections; see docs/recipe.md"])
    if isinstance(values.get("data"), dict) and isinstance(values["data"].get("fasta"), str):
        values["data"]["fasta"] = str((path.parent / values["data"]["fasta"]).resolve())
    for override in overrides:
        _override(values, override, lines, faults)
    return validate(values, lines, str(path), faults)


def _override(values: dict, override: str, lines: dict[str, str], faults: list[str]) -> None:
    """Apply one `section.key=value`; the value is YAML."""
    key, equals, text = override.partition("=")
    key, where = key.strip(), f"--set {override}"
    if not equals or not key:
        faults.append(f"{where}: an override is section.key=value")
        return
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        lines.setdefault(".".join(parents[: depth + 1]), where)
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    lines[key] = where
    values[leaf] = _parse(text, where, lines, faults, key)


def shipped_directory() -> Path:
    """The folder of the shipped recipes: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def find(path: str | Path) -> tuple[Path, bool]:
    """Resolve a RECIPE argument to (file, taken from the shipped recipes).

    A path that does not exist but whose name is a shipped recipe is taken from the package. Raises RecipeError.
    """
    path = Path(path)
    if path.is_file():
        return path, False
    name = path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml"
    shipped = shipped_directory() / name
    if shipped.is_file():
        return shipped, True
    names = sorted(p.stem for p in shipped_directory().glob("*.yaml"))
    close = difflib.get_close_matches(path.stem, names, 1)
    hint = f"did you mean {close[0]}?" if close else f"shipped recipes are {', '.join(names)}"
    raise RecipeError([f"{path}: there is no such recipe; {hint}"])


def to_dict(recipe: Recipe) -> dict:
    """Plain values of a recipe, keys as in YAML."""
    return recipe.model_dump(mode="json", by_alias=True)


def dump(recipe: Recipe, reasons: dict[str, str] | None = None) -> str:
    """YAML text of a recipe that `load` reads back equal; `reasons` (section.key -> why) become comments on their lines."""
    out: list[str] = []

    def write(values: dict, prefix: str, indent: int) -> None:
        for key, value in values.items():
            full = prefix + key
            pad = "  " * indent
            if isinstance(value, dict):
                out.append(f"{pad}{key}:")
                write(value, full + ".", indent + 1)
            else:
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
                why = (reasons or {}).get(full)
                out.append(f"{pad}{key}: {text}" + (f"  # {why}" if why else ""))

    write(to_dict(recipe), "", 0)
    return "\n".join(out) + "\n"


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Keys (section.key) whose values differ between two recipes."""

    def flat(values: dict, prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
        return found

    a, b = flat(to_dict(old)), flat(to_dict(new))
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
