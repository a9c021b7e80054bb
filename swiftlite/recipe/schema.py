"""The recipe: frozen, typed sections with a help line beside every key. Imports no torch."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr


class Section(BaseModel):
    """A frozen section; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=False)


class ModelSection(Section):
    name: str = Field(description="Hub id[@revision], folder, GGUF file, or package://package/file.")
    hub: Literal["hf", "modelscope"] = Field("hf", description="Where a hub id is looked up.")
    adapter: str | None = Field(None, description="Folder of an existing LoRA adapter to go on from.")
    trust_remote_code: bool = Field(False, description="Run Python code shipped inside the model folder.")
    add_tokens: list[str] = Field([], description="Tokens to add; `<...>` and `[...]` forms become special tokens.")
    config_overrides: dict[str, Any] = Field({}, description="Values that replace keys of the model's config.json.")
    attn_implementation: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "varlen"
    ] = Field(
        "auto",
        description="Attention backend; auto takes the fastest one that is right for the family. varlen: torch's own kernel for "
        "joined rows of any length.",
    )


class DataSource(Section):
    path: str = Field(
        description="File, folder, glob, or hub dataset as org/name:subset[split]@revision; #n behind it draws n rows."
    )
    name: str | None = Field(None, description="Name of this source in reports and of its evaluation set.")
    subset: str | None = Field(None, description="Configuration name of a hub dataset.")
    split: str = Field("train", description="Split of a hub dataset.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub dataset.")
    format: str | None = Field(None, description="Format of this source; default: data.format.")
    columns: dict[str, str] | None = Field(None, description="Column names of this source; default: data.columns.")
    sample: PositiveInt | None = Field(None, description="Take this many rows, drawn with the recipe's seed.")
    system: str | None = Field(None, description="System prompt for rows of this source that have none.")
    weight: PositiveFloat = Field(1, description="How often its rows come in an epoch; of a fraction, that share of them.")


class DataSection(Section):
    train: list[DataSource] = Field([], description="Training sources: a path, or a list of paths or {path, ...}.")
    eval: list[DataSource] = Field([], description="Evaluation sources; each named one is a set of its own.")
    eval_split: NonNegativeFloat = Field(0, description="Rows (whole number) or share (< 1) of training rows held back.")
    format: str = Field("auto", description="Row format; auto finds it by the columns.")
    columns: dict[str, str] = Field({}, description="Maps our column name to the one in the file, as {prompt: question}.")
    train_on: Literal["assistant", "last", "all", "completion"] = Field(
        "assistant", description="Trained tokens: every assistant turn, the last one, everything, or the completion."
    )
    max_length: PositiveInt = Field(
        4096, description="Tokens a training row may have; data.overlong says what happens to longer ones."
    )
    overlong: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="Rows over max_length, all counted; split: text in pieces, chats between exchanges with the system prompt.",
    )
    packing: bool = Field(
        False, description="Join rows into packs of max_length tokens, kept apart in the attention; batch sizes then count packs."
    )
    padding_free: bool = Field(False, description="Join the rows of a forward pass into one row instead of padding them.")
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = Field(
        "random", description="Order within an epoch; group_by_length: random, but for steps of rows of like lengths."
    )
    chat_template: str | None = Field(None, description="Jinja file or text that replaces the model's chat template.")
    template_kwargs: dict[str, Any] = Field({}, description="Variables handed to the chat template.")
    allow_control_tokens: bool = Field(
        False,
        description="Control tokens spelled in messages become such; else only the chat template's and model.add_tokens.",
    )
    history_mismatch: Literal["split", "last", "error"] = Field(
        "split",
        description="Rows whose earlier turns the template alters: a row for each question's answers, the last only, or refused.",
    )
    streaming: bool = Field(
        False, description="Read training rows on the way instead of preparing all before step 1; needs train.max_steps."
    )
    stream_shards: PositiveInt = Field(
        64, description="Logical streams that rows come from in turn, dealt to the ranks: best a multiple of their number."
    )
    shuffle_buffer_size: PositiveInt = Field(
        10000, description="Rows that are mixed at a time when streaming, over all streams; packs are made of one stream's."
    )
    num_workers: NonNegativeInt = Field(2, description="Threads that prepare the coming steps while one trains; 0: none.")
    on_bad_rows: Literal["error", "skip"] = Field("error", description="Stop at a row that cannot be used, or skip and count it.")
    max_bad_fraction: float = Field(0.01, ge=0, le=1, description="With on_bad_rows skip: stop above this share of bad rows.")
    num_proc: PositiveInt | None = Field(None, description="Processes that prepare rows. Default: cores.")
    cache_dir: str | None = Field(
        None, description="Folder of prepared rows, kept between runs. Default ~/.cache/swiftlite/data."
    )


class LoraSection(Section):
    rank: PositiveInt = Field(16, description="Rank of the update matrices.")
    alpha: PositiveFloat | None = Field(None, description="Scale: updates are multiplied by alpha / rank. Default 2 * rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in front of the adapters.")
    target_modules: str | list[str] = Field(
        "all-linear", description="all-linear (no head, router, experts, tower), names, or a regex."
    )
    exclude_modules: list[str] = Field([], description="Names that get no adapter.")
    modules_to_save: list[str] = Field([], description="Modules trained in full beside the adapters.")
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(rank).")
    use_dora: bool = Field(False, description="Weight-decomposed LoRA.")
    experts: bool = Field(
        False,
        description="Adapt routed experts too; each pass makes a changed copy of them, and vLLM loads no such adapter.",
    )
    init: Literal["default", "gaussian", "pissa", "olora", "qera"] = Field(
        "default",
        description="How adapters start: with an update of zero; pissa, olora: as a part of the base that is taken out; qera: "
        "giving back what quantize took.",
    )
    lr_ratio: PositiveFloat = Field(1.0, description="LoRA+: the B matrices learn this many times as fast as the A matrices.")

    @property
    def splits(self) -> bool:
        """Whether the base's weights are split into adapter and rest."""
        return self.init in ("pissa", "olora")

    @property
    def starts_at_base(self) -> bool:
        """Whether the model without its new adapters is the one that training starts from."""
        return self.init in ("default", "gaussian")


class QuantizeSection(Section):
    method: Literal["nf4", "fp8"] = Field(description="nf4: 4 bits a weight; fp8: 8, and float8 products where there are any.")
    double_quant: bool = Field(False, description="With nf4: scales in 8 bits, which saves 0.37 bits a weight.")
    skip: list[str] = Field(["lm_head"], description="Modules that stay as they are: names, last parts or patterns.")


class StrategySection(Section):
    name: str | None = Field(None, description="How the model is spread over ranks. Default none on one process, else fsdp.")
    shard: PositiveInt | None = Field(None, description="Ranks of one sharding group of hsdp. Default the ranks of a host.")
    offload: Literal["none", "optimizer", "params"] = Field(
        "none",
        description="Into host memory: optimizer (state and fp32 masters; it runs there), or params (weights and gradients too).",
    )
    prefetch: PositiveInt = Field(1, description="Blocks gathered ahead of the one that computes.")
    timeout_s: PositiveInt = Field(600, description="Seconds without a sign from a rank after which the run ends.")
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Data type in which gradients are summed over ranks.")
    wrap: list[str] = Field([], description="Block class names to shard, where the family's own are not wanted.")
    config: str | None = Field(None, description="A DeepSpeed JSON, read into keys of the recipe; comments are allowed.")


class TrainSection(Section):
    objective: str = Field("sft", description="What is learned; see `swiftlite explain train.objective`.")
    dpo_beta: PositiveFloat | None = Field(
        None, description="With objective dpo: how closely the model is held to where it starts. Default 0.1."
    )
    num_train_epochs: PositiveFloat = Field(1, description="Passes over the training rows.")
    max_steps: PositiveInt | None = Field(None, description="Optimizer steps; beats num_train_epochs.")
    global_batch_size: PositiveInt | None = Field(
        None, description="Rows, packs or pairs of one optimizer step over all ranks. Default 16."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Rows of one forward pass on one rank.")
    gradient_accumulation_steps: PositiveInt | None = Field(
        None, description="Forward passes of one optimizer step; derived when absent."
    )
    learning_rate: NonNegativeFloat | None = Field(None, description="Peak rate. Default 2e-4 LoRA, 1e-4 DoRA, 1e-5 full.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "cosine", description="Shape of the rate."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Last rate as a share of the peak.")
    warmup_steps: NonNegativeFloat = Field(0.03, description="Warm-up: steps (whole number) or share of all steps (< 1).")
    optim: Literal["adamw", "adamw_8bit", "sgd"] = Field(
        "adamw", description="Optimizer; adamw_8bit keeps about 2 bytes of state a weight instead of 8."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW: decay of the second moment.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW: term in the denominator.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay; norms and biases are exempt.")
    max_grad_norm: NonNegativeFloat = Field(1.0, description="Clip the global gradient norm to this; 0 is off.")
    precision: Literal["auto", "bf16", "bf16_pure", "fp16", "fp32"] = Field(
        "auto",
        description="Compute type; trainable weights stay fp32 but for bf16_pure. auto: bf16 where the GPU has it, else fp32.",
    )
    device: Literal["auto", "cuda", "mps", "cpu"] = Field("auto", description="Where to train.")
    gradient_checkpointing: Literal["none", "selective", "full"] | None = Field(
        None,
        description="Compute activations of each block again in the backward pass; selective keeps attention and half of the "
        "matrix products. Default full on a GPU, none on a CPU.",
    )
    activation_offload: bool = Field(
        False, description="With gradient_checkpointing full: keep the blocks' inputs in host memory until the backward pass."
    )
    torch_compile: Literal["auto"] | bool = Field(
        "auto", description="Compile each block; auto: on a GPU where rows are packed, and so have one shape."
    )
    label_smoothing_factor: float = Field(
        0.0, ge=0, lt=1, description="Share of each target spread over the vocabulary; evaluation is without it."
    )
    neftune_noise_alpha: PositiveFloat | None = Field(
        None, description="Noise on input embeddings (NEFTune); with it splits of a batch differ. The paper tries 5, 10 and 15."
    )
    router_aux_loss_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the load-balancing loss of experts; above 0 splits of a batch differ."
    )
    trainable: list[str] | None = Field(None, description="Name patterns (fnmatch) of the weights to train; the rest is frozen.")
    full_determinism: bool = Field(False, description="Deterministic kernels on GPUs; slower.")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="A NaN or infinite loss or gradient stops the run, or the step is skipped and counted."
    )


class EvalSection(Section):
    eval_strategy: Literal["no", "steps", "epoch"] | None = Field(
        None, description="When to evaluate. Default epoch if there is eval data."
    )
    eval_steps: PositiveFloat | None = Field(None, description="Steps between evaluations, or share (< 1) of all steps.")
    eval_on_start: bool = Field(False, description="Evaluate before the first step.")
    per_device_eval_batch_size: PositiveInt | None = Field(
        None, description="Rows of one forward pass. Default: the training one."
    )


class LogSection(Section):
    logging_steps: PositiveInt = Field(10, description="Steps between log rows; step 1 is always logged.")
    report_to: list[str] = Field([], description="Trackers, as [tensorboard, wandb, mlflow, ...].")
    run_name: str | None = Field(None, description="Name of the run in trackers.")
    project: str | None = Field(None, description="Project in trackers.")


class CheckpointSection(Section):
    save_strategy: Literal["no", "steps", "epoch"] = Field(
        "epoch", description="When to save; the end is always saved but for no."
    )
    save_steps: PositiveFloat | None = Field(None, description="Steps between saves, or share (< 1) of all steps.")
    save_minutes: NonNegativeFloat = Field(60, description="Also save when this much time passed since the last save; 0 is off.")
    save_total_limit: PositiveInt | None = Field(
        2, description="Checkpoints kept, newest first; the best one is kept beside them."
    )
    metric_for_best_model: str = Field("eval_loss", description="The metric (lower is better) that names the best checkpoint.")
    async_save: bool | None = Field(
        None, description="Write checkpoints while training goes on; it stops only to copy them. Default on a GPU."
    )
    save_only_model: bool = Field(False, description="Leave optimizer state out; such a checkpoint cannot be resumed.")
    resume: str | None = Field(None, description="auto (newest complete checkpoint) or a checkpoint folder.")


class ExportSection(Section):
    formats: list[str] | None = Field(None, description="What to write at the end. Default [adapter] with lora, else [merged].")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="Data type of merged weights; auto: the base's.")
    onto: Literal["auto", "dequantised", "original"] = Field(
        "auto",
        description="With quantize, what merged weights start from: the values trained on, or those of the model's files; "
        "auto: whichever is closer to the trained model.",
    )
    max_shard_size: str = Field("5GB", description="Largest weight file of a merged export.")
    overwrite: bool = Field(False, description="Replace an earlier export in the target folder.")


class Recipe(Section):
    """One fine-tuning run."""

    model: ModelSection = Field(description="The model to start from.")
    data: DataSection = Field(default_factory=DataSection, description="Rows to train and evaluate on.")
    lora: LoraSection | None = Field(None, description="LoRA adapters; absent: full fine-tuning.")
    quantize: QuantizeSection | None = Field(
        None, description="Keep the frozen weights of the blocks' linear layers and experts in few bits; needs lora."
    )
    strategy: StrategySection = Field(default_factory=StrategySection, description="How the model is spread over ranks.")
    train: TrainSection = Field(default_factory=TrainSection, description="The optimisation.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Evaluation during training.")
    log: LogSection = Field(default_factory=LogSection, description="Log rows and trackers.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Saving and resuming.")
    export: ExportSection = Field(default_factory=ExportSection, description="What is written at the end.")
    plugins: list[str] = Field(
        [], description="Python files with rows of your own for the tables (formats, objectives, ...); their code is run."
    )
    output: str | None = Field(None, description="Folder of the run. Default runs/<recipe name>.")
    seed: NonNegativeInt = Field(42, description="Seed of data order, adapter initialisation and dropout.")

    # Texts as written where `${NAME}` stood in them, by place: a value of the environment is neither shown nor saved.
    _written: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
