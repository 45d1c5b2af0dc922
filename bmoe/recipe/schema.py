"""The sections of a recipe: every key with its type, default and meaning. docs/recipe.md is generated from here."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator


def _whole(value: Any) -> Any:
    """People write 5e5 for a number of steps: a float that is whole is an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, BeforeValidator(_whole), Field(ge=1, strict=True)]
Natural = Annotated[int, BeforeValidator(_whole), Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0.0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
Beta = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(strict=True, ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class PrepareSection(Section):
    """Options of `bmoe prepare` that `bmoe train` uses when it prepares `data.fasta` itself; the flags' names."""

    valid_fraction: Fraction = Field(0.005, description="share of sequences (or clusters) held out for validation")
    test_fraction: Fraction = Field(0.0, description="share of sequences (or clusters) held out for a final test")
    clusters: str | None = Field(None, description="TSV of member and representative, or `uniref` to read them off UniRef headers")
    dedup: Flag = Field(True, description="keep the first of exactly equal sequences")
    min_length: Natural = Field(2, description="shortest sequence kept, in residues")
    max_length: Positive | None = Field(None, description="longest sequence kept, in residues; null keeps all")
    on_invalid: Literal["unknown", "drop", "error"] = Field(
        "unknown", description="a letter outside the alphabet becomes the unknown token, drops its record, or stops the run"
    )
    internal_stop: Literal["unknown", "drop", "error"] = Field("unknown", description="the same for a `*` inside a sequence")
    gaps: Literal["remove", "invalid"] = Field("remove", description="`-` and `.` are taken out, or count as invalid letters")
    n_runs: Literal["split", "keep"] = Field("split", description="DNA: cut records at long runs of N, or leave them")
    keep_headers: Flag = Field(True, description="store the header lines, for `bmoe eval --by`")


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
    reverse_complement: Flag = Field(False, description="DNA: read every other window, by chance, from the other strand")
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
    normalize_weights: Flag = Field(True, description="divide the weights of the chosen experts by their sum")
    groups: Positive | None = Field(None, description="group-limited routing: number of equal groups of experts")
    groups_kept: Positive | None = Field(None, description="group-limited routing: groups a token may choose from")
    balance_loss: NonNegative = Field(0.01, description="coefficient of the load balance loss, per layer")
    z_loss: NonNegative = Field(0.001, description="coefficient of the router z-loss, per layer")
    bias_update: NonNegative = Field(0.0, description="rate of the aux-loss-free balance bias, once per optimizer step; 0 is off")
    jitter: Annotated[float, Field(strict=True, ge=0.0, lt=1.0)] = Field(0.0, description="noise on router inputs in training")


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
    bias: Flag = Field(False, description="biases in linear layers")
    qk_norm: Flag = Field(False, description="normalise queries and keys per head")
    rope_base: PositiveFloat = Field(10000.0, description="base of the rotary position embedding")
    token_dropout: Flag = Field(True, description="encoders: ESM-2's rescaling of embeddings by the share of `<mask>` tokens")
    tie_head: Flag = Field(True, description="the output projection shares the embedding's weights")
    init_from: str | None = Field(None, description="folder to start from: one that `bmoe export` wrote, or dense ESM-2 weights to upcycle")
    init_noise: NonNegative = Field(
        0.0, description="upcycling: noise on experts, in standard deviations of their weights; 0 keeps the function"
    )
    moe: MoESection | None = Field(default_factory=MoESection, description="null is the dense model")


class ObjectiveSection(Section):
    """What is predicted."""

    kind: Literal["mlm", "clm"] = Field("mlm", description="masked tokens (encoder) or the next token (decoder)")
    mask_fraction: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = Field(0.15, description="mlm: share of residues asked for")
    mask_token: Fraction = Field(0.8, description="mlm: share of targets shown as `<mask>`")
    random_token: Fraction = Field(0.1, description="mlm: share of targets shown as a random residue; the rest is shown as it is")


class HighPrecisionSection(Section):
    """Layers kept in bf16 under low precision."""

    first: Natural = Field(0, description="how many of the first layers")
    last: Natural = Field(0, description="how many of the last layers")


class PrecisionSection(Section):
    """Arithmetic of the matrix products. Router and losses are always fp32, optimizer masters too."""

    kind: Literal["fp32", "bf16", "fp8_row", "fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4"] = Field(
        "bf16",
        description="format of GEMM inputs; fp8_row: our own kernels (Hopper); nvfp4: emulated only; other 8 bits: Transformer Engine",
    )
    high_precision_layers: HighPrecisionSection = Field(default_factory=HighPrecisionSection)
    emulate: Flag = Field(False, description="round GEMM inputs to `kind` in software, on any machine: for convergence, not speed")
    emulate_linears: Flag = Field(False, description="emulation: round the blocks' other linear layers too, not only the experts")
    statistics_every: Positive | None = Field(None, description="steps between quantisation statistics in the metrics; null is off")


class BackendSection(Section):
    """Which implementation runs; results agree to rounding."""

    experts: Literal["auto", "loop", "grouped", "te", "triton"] = Field("auto", description="implementation of the experts")
    attention: Literal["auto", "sdpa", "varlen", "flash"] = Field(
        "auto", description="per-sequence SDPA, torch's variable-length flash, or flash-attn-4"
    )
    compile: Literal["auto", True, False] = Field("auto", description="torch.compile of the layers; auto: GPU yes, CPU no")
    recompute: Literal["none", "experts", "full"] = Field("none", description="activations computed again in the backward pass")
    graphs: Literal["auto", True, False] = Field("auto", description="steps replayed as CUDA graphs; auto: on one GPU, where nothing waits")


class ParallelSection(Section):
    """World size = data_replicate x data_shard x expert; every rank has batches of its own."""

    data_replicate: Positive = Field(1, description="copies of the whole model")
    data_shard: Literal["auto"] | Positive = Field("auto", description="ranks that share the parameters (FSDP2); auto: what is left")
    expert: Positive = Field(1, description="ranks that share the experts (expert parallelism)")


class OptimizerSection(Section):
    """AdamW with decoupled weight decay on matrices only."""

    kind: Literal["adamw"] = Field("adamw", description="the optimizer")
    lr: PositiveFloat = Field(4.0e-4, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="moment decay rates")
    eps: PositiveFloat = Field(1.0e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(0.01, description="decoupled weight decay of matrices")
    clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null does not clip")
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
    async_: Flag = Field(True, alias="async", description="write in the background while training goes on")


class LoggingSection(Section):
    """Where the numbers go; RUN/metrics.jsonl always has them."""

    every: Positive = Field(10, description="steps between lines; the first and the last step always are")
    tensorboard: Flag = Field(False, description="also write TensorBoard events (extra `track`)")
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
