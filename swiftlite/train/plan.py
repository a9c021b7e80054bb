"""Everything that can be known before the model is built: sources, data, steps. `swiftlite check` stops here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from swiftlite.data.loader import SAMPLES, Loader
from swiftlite.data.preference import check_keys as check_pairs
from swiftlite.data.prepare import Prepared, prepare
from swiftlite.data.render import Renderer, Sample
from swiftlite.data.store import highest_id
from swiftlite.data.streaming import Stream, check_keys
from swiftlite.data.template import template_text
from swiftlite.dist import checkpoint
from swiftlite.dist.launch import ranks
from swiftlite.dist.strategies import Strategy
from swiftlite.dist.world import pick_device
from swiftlite.models import prequantised, qera
from swiftlite.models.build import Precision, load_config
from swiftlite.models.sources import ModelFiles, resolve_model
from swiftlite.models.tokenizer import load_tokenizer, new_rows, pad_id
from swiftlite.objectives import protocol as objectives
from swiftlite.objectives.protocol import Objective
from swiftlite.recipe import tables
from swiftlite.recipe.errors import ModelError, RecipeError, nearest
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.plugins import install
from swiftlite.recipe.schema import Recipe
from swiftlite.train.schedule import Schedule

# Of a stream: some of these are shown, exports are compared on some, and lora.init: qera begins with them.
FIRST_ROWS = qera.ROWS


@dataclass
class Plan:
    """A run before its model exists."""

    loaded: Loaded
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    device: torch.device
    precision: Precision
    strategy: Strategy
    world_size: int
    checkpointing: str
    compiled: bool
    train: Prepared
    loader: Loader | Stream
    evals: dict[str, Loader]
    schedule: Schedule
    objective: Objective
    reports: dict[str, Any]
    data_hash: str
    notes: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def output(self) -> Path:
        assert self.recipe.output is not None
        return Path(self.recipe.output)

    def refuse_second_run(self) -> None:
        """Raises RecipeError when the output folder holds a run that is not to be resumed."""
        good, _ = checkpoint.complete(self.output / "checkpoints")
        if good and self.recipe.checkpoint.resume is None:
            what = f"it holds a run already, with checkpoints up to step {checkpoint.step_of(good[-1])}"
            raise RecipeError(what, where=self.output, fix="Go on with --resume auto, or choose another --output.")

    def lines(self) -> list[str]:
        """The start of a run for a person: what is trained on what, for how long."""
        recipe = self.recipe
        return [
            f"model     {recipe.model.name} on {self.device.type}, {self.precision.name}, strategy {self.strategy.name}"
            + ("" if self.checkpointing == "none" else f", {self.checkpointing} activation checkpointing")
            + (", compiled blocks" if self.compiled else ""),
            f"data      {self._rows_line()}" + "".join(f"; {name}: {self._count(loader)}" for name, loader in self.evals.items()),
            *self.step_lines(),
            f"output    {self.output}",
        ]

    def _count(self, loader: Loader) -> str:
        """How many rows or pairs it has."""
        return f"{len(loader.samples) // SAMPLES[loader.eats]:,} {loader.eats}"

    def _rows_line(self) -> str:
        loader, samples = self.loader, self.train.samples
        if isinstance(loader, Stream):
            return loader.about
        trained, tokens = int(samples.trained.sum()), int(samples.lengths.sum())
        cached = f", from the cache {self.train.cached}" if self.train.cached else ""
        packed = f" in {loader.units_per_epoch:,} packs, {loader.fill:.1%} full" if loader.capacity else ""
        return f"{self._count(loader)}, {tokens:,} tokens, {trained:,} trained ({trained / max(1, tokens):.0%}){packed}{cached}"

    def step_lines(self) -> list[str]:
        """How many steps of what size, at what rate, and when something happens between them."""
        train, schedule, rate = self.recipe.train, self.schedule, self.schedule.rate
        size, passes = train.per_device_train_batch_size, train.gradient_accumulation_steps
        unit = ("pack" if self.loader.capacity else self.loader.eats[:-1]) + "s" * (train.global_batch_size != 1)
        each = f"{train.global_batch_size} {unit} in {passes} forward pass{'es' * (passes != 1)} of {size}"
        each += f" on each of {self.world_size} processes" * (self.world_size > 1)
        happens = {"log": schedule.log_every, "evaluate": schedule.eval_every, "save": schedule.save_every}
        rhythm = ", ".join(f"{what} every {steps:,}" for what, steps in happens.items() if steps)
        exports = ", ".join(self.recipe.export.formats or []) or "nothing"
        an_epoch = "" if isinstance(self.loader, Stream) else f" ({schedule.per_epoch:,} an epoch)"
        return [
            f"steps     {schedule.total:,}{an_epoch}, each of {each}",
            f"rate      {rate.kind}, peak {rate.peak:g}, {rate.warmup} warm-up steps, last {rate.at(schedule.total - 1):.2g}",
            f"rhythm    {rhythm} steps, and at the end; then export {exports}",
        ]

    def settled(self, config: Any) -> list[tuple[str, str, str]]:
        """`(key, value, origin)` of what the recipe leaves to this machine and to the model's family.

        Args:
            config: of the built model, which knows its attention backend.
        """
        device = self.device.type
        found = [
            ("model.attn_implementation", config._attn_implementation, f"family: {config.model_type}"),
            ("strategy.name", self.strategy.name, f"derived: {self.world_size} process{'es' * (self.world_size > 1)}"),
            ("train.device", device, "device: the first of cuda, mps, cpu that is here"),
            ("train.precision", self.precision.name, f"device: {device}"),
            ("train.gradient_checkpointing", self.checkpointing, f"device: {device}"),
            ("train.torch_compile", str(self.compiled).lower(), f"device: {device}"),
        ]
        data = self.recipe.model_dump()
        return [row for row in found if data[row[0].partition(".")[0]][row[0].partition(".")[2]] in (None, "auto")]


def make_plan(loaded: Loaded, *, need_weights: bool = True, world_size: int | None = None) -> Plan:
    """Reads model files (without weights on request) and data, and plans every step.

    Args:
        world_size: ranks to plan for; default those that are here.

    Raises:
        RecipeError, ModelError, DataError: with what to change.
    """
    install(loaded.plugins)  # another recipe may have been loaded since
    recipe, notes, world_size = loaded.recipe, list(loaded.notes), world_size or ranks().size
    if recipe.data.streaming:
        check_keys(recipe.data, recipe.train.max_steps)
    objective = objectives.load(recipe)
    eats = getattr(objective, "eats", "rows")
    if eats == "pairs":
        check_pairs(recipe.data)
    device, precision, strategy = _machine(recipe, world_size)
    files = resolve_model(recipe.model, need_weights=need_weights, to_train=True)
    loaded, found = prequantised.adopt(loaded, files)
    recipe, notes = loaded.recipe, notes + found
    text, tokenizer = load_config(files, recipe)[0].get_text_config(), load_tokenizer(files, recipe.model)
    renderer = _renderer(recipe, tokenizer, text.vocab_size)
    longest = getattr(text, "max_position_embeddings", None) or recipe.data.max_length
    if longest < recipe.data.max_length:
        notes.append(f"data.max_length {recipe.data.max_length} is above the model's {longest}: rows are held to {longest}")
    max_length = min(recipe.data.max_length, longest)

    size = recipe.train.per_device_train_batch_size
    assert recipe.train.global_batch_size is not None
    joined = _joined(recipe, max_length, device) | {"eats": eats}
    rows = text.vocab_size + (new_rows(text.vocab_size, tokenizer) if recipe.model.add_tokens else 0)
    # A tokenizer may name a padding token that the model has no row for; any id will do.
    pad = pad_id(tokenizer) if pad_id(tokenizer) < rows else 0
    steps = {
        "seed": recipe.seed, "order": recipe.data.train_sampling_strategy, "rows_per_step": recipe.train.global_batch_size,
        "micro_batch": size, "pad_id": pad,
    } | joined  # fmt: skip
    train, loader, data_hash = _training_rows(recipe, renderer, max_length, steps, lambda s: _check_ids([s], rows, tokenizer))
    reports: dict[str, Any] = {"train": train.report} if train.report else {}
    evals = {}
    eval_size = recipe.eval.per_device_eval_batch_size or size
    for name, samples, report in _eval_sets(recipe, renderer, max_length, train, eats):
        if name in evals:
            fix = "Name them apart: {path: ..., name: ...}."
            raise RecipeError(f"two evaluation sets are named '{name}'", where="data.eval", fix=fix)
        if report is not None:
            reports[name] = report
        evals[name] = Loader(
            samples, seed=0, order="sequential", rows_per_step=eval_size * ranks().size, micro_batch=eval_size, pad_id=pad,
            **joined,
        )  # fmt: skip
    notes += renderer.notes + train.notes
    _check_metric(recipe, evals)
    for samples in (train.samples, *(loader.samples for loader in evals.values())):
        _check_ids(samples, rows, tokenizer)
    checkpointing, compiled = _blocks(recipe, device)
    schedule = Schedule.of(recipe, loader.steps_per_epoch)
    return Plan(
        loaded, files, tokenizer, renderer, device, precision, strategy, world_size, checkpointing, compiled,
        train, loader, evals, schedule, objective, reports, data_hash, notes,
    )  # fmt: skip


def _blocks(recipe: Recipe, device: torch.device) -> tuple[str, bool]:
    """How blocks run: what they compute again, and whether they are compiled."""
    checkpointing = recipe.train.gradient_checkpointing or ("full" if device.type == "cuda" else "none")
    if recipe.train.activation_offload and checkpointing != "full":
        what = f"it keeps what full checkpointing starts from, and gradient_checkpointing is {checkpointing}"
        raise RecipeError(what, where="train.activation_offload", fix="Set train.gradient_checkpointing: full.")
    compiled = recipe.train.torch_compile
    return checkpointing, device.type == "cuda" and recipe.data.packing if compiled == "auto" else compiled


def _training_rows(
    recipe: Recipe, renderer: Renderer, max_length: int, steps: dict[str, Any], check: Callable[[Sample], None]
) -> tuple[Prepared, Loader | Stream, str]:
    """The rows, what deals them to steps, and a hash that a resumed run must find again; of a stream the first rows only.

    Args:
        steps: how they are dealt, for Loader and Stream.
        check: of a stream, which meets its rows later; raises for a row that the model cannot take.
    """
    data = recipe.data
    if data.streaming:
        stream = Stream(data.train, data, renderer, max_length=max_length, check=check, **steps)
        return Prepared(stream.settle(FIRST_ROWS), {}), stream, stream.fingerprint
    train = prepare(
        data.train,
        data,
        renderer,
        max_length=max_length,
        seed=recipe.seed,
        eval_split=data.eval_split,
        eats=steps["eats"],
    )
    return train, Loader(train.samples, **steps), train.samples.digest


def _machine(recipe: Recipe, world_size: int) -> tuple[torch.device, Precision, Strategy]:
    """Device, types and strategy, which must go together."""
    device = pick_device(recipe.train.device)
    precision = Precision.of(recipe.train.precision, device)
    default = "none" if world_size == 1 else "fsdp"
    strategy: Strategy = tables.load(tables.STRATEGIES, recipe.strategy.name or default, "strategy.name")
    if device.type == "mps" and strategy.sharded:
        raise RecipeError("FSDP2 does not run on mps", where="strategy.name", fix="Use strategy: none.")
    if device.type == "mps" and precision.compute != precision.master:
        fix = "Use fp32 or bf16_pure."
        raise RecipeError(f"precision {precision.name} needs FSDP2, which mps lacks", where="train.precision", fix=fix)
    return device, precision, strategy


def _renderer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Renderer:
    data = recipe.data
    return Renderer(
        tokenizer,
        train_on=data.train_on,
        template_kwargs=data.template_kwargs,
        chat_template=template_text(data.chat_template) if data.chat_template else None,
        history_mismatch=data.history_mismatch,
        allow_control_tokens=data.allow_control_tokens,
        free_tokens=recipe.model.add_tokens,
        vocab_size=max(len(tokenizer), vocabulary),
    )


def _joined(recipe: Recipe, max_length: int, device: torch.device) -> dict[str, Any]:
    """How rows are joined. On a GPU packs have one length, of whole blocks of compiled attention: each length compiles anew."""
    data, multiple = recipe.data, 1
    if data.packing and device.type == "cuda":
        multiple = -(-max_length // 128) * 128
    joined = {"capacity": max_length if data.packing else None, "padding_free": data.padding_free, "multiple": multiple}
    return joined | {"data_rank": ranks().rank, "data_size": ranks().size}


def _eval_sets(
    recipe: Recipe, renderer: Renderer, max_length: int, train: Prepared, eats: str
) -> Iterator[tuple[str, Sequence[Sample], Any]]:
    """Evaluation sets as (name, samples, report): held-back rows as `eval`, each source under its name, or its file's."""
    if train.held_back:
        yield "eval", train.held_back, None
    for source in recipe.data.eval:
        if source.weight != 1:
            raise RecipeError("every row of an evaluation set counts once", where="data.eval: weight", fix="Remove it.")
        prepared = prepare([source], recipe.data, renderer, max_length=max_length, seed=recipe.seed, eats=eats)
        yield source.name or ("eval" if len(recipe.data.eval) == 1 else Path(source.path).stem), prepared.samples, prepared.report


def _check_metric(recipe: Recipe, evals: dict[str, Loader]) -> None:
    """checkpoint.metric_for_best_model must be a number that an evaluation gives."""
    name, legal = recipe.checkpoint.metric_for_best_model, ["eval_loss", *(f"eval_loss/{n}" for n in evals if len(evals) > 1)]
    if evals and name not in legal:
        raise RecipeError(
            f"no evaluation gives '{name}'.{nearest(name, legal)}",
            where="checkpoint.metric_for_best_model",
            fix=f"Known: {', '.join(legal)}.",
        )


def _check_ids(samples: Sequence[Sample], rows: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every id must have a row in the model's embeddings: tokenizers come with ids that their model never had."""
    top, source = highest_id(samples)
    if top >= rows:
        token = tokenizer.convert_ids_to_tokens(top)
        raise ModelError(
            f"token '{token}' has id {top}, and the model has {rows} embedding rows",
            where=source,
            fix=f"Name it in model.add_tokens: ['{token}'].",
        )
