"""Defaults that depend on other keys, and what single keys cannot know: whether they fit each other. Pure, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from swiftlite.recipe import tables
from swiftlite.recipe.errors import nearest
from swiftlite.recipe.plugins import Plugin
from swiftlite.recipe.reading import Faults
from swiftlite.recipe.schema import LoraSection, Recipe

DEFAULT_GLOBAL_BATCH_SIZE = 16
TOTAL, MICRO, STEPS = "train.global_batch_size", "train.per_device_train_batch_size", "train.gradient_accumulation_steps"


@dataclass(frozen=True)
class Loaded:
    """A recipe without open questions.

    Attributes:
        origins: for each key where its value comes from: `file:line`, `command line`, `default`, `default: ...`,
            `method: lora`, `derived: ...`. Sources have theirs under `data.train`.
        notes: lines for the user: names understood as others.
        path: the file it was read from.
        plugins: what was run of the recipe's `plugins`.
    """

    recipe: Recipe
    origins: dict[str, str]
    notes: list[str] = field(default_factory=list)
    path: str | None = None
    plugins: tuple[Plugin, ...] = ()

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 of each plugin by its path."""
        return {plugin.path: plugin.sha256 for plugin in self.plugins}

    @property
    def method(self) -> str:
        """`lora`, `dora`, `partial` or `full`."""
        if self.recipe.lora:
            return "dora" if self.recipe.lora.use_dora else "lora"
        return "partial" if self.recipe.train.trainable else "full"

    def given(self, key: str) -> bool:
        """Whether the user said it."""
        origin = self.origins.get(key, "default")
        return origin != "default" and not origin.startswith(("default: ", "method: ", "derived: "))

    def where(self, key: str) -> str | None:
        """`file:line` or `command line` of a key, for messages; None for defaults."""
        return self.origins[key] if self.given(key) else None


class _Draft:
    """A recipe whose open keys are being filled in."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.origins = loaded, dict(loaded.origins)
        self.changes: dict[str, dict[str, Any]] = {}
        self.faults, self.notes = Faults(), list(loaded.notes)

    def __getitem__(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        if name in self.changes.get(section, {}):
            return self.changes[section][name]
        return getattr(getattr(self.loaded.recipe, section) if section else self.loaded.recipe, name)

    def given(self, key: str) -> bool:
        """Whether the user gave a value; `null` asks for the default."""
        return self.loaded.given(key) and self[key] is not None

    def fill(self, key: str, value: Any, origin: str) -> None:
        """Sets a key, unless the user did."""
        if not self.given(key):
            section, _, name = key.rpartition(".")
            self.changes.setdefault(section, {})[name] = value
            self.origins[key] = origin

    def fault(self, key: str, what: str, fix: str | None = None) -> None:
        self.faults.add(f"{key}: {what}", where=self.loaded.where(key) or self.loaded.path, fix=fix)

    def done(self) -> Loaded:
        self.faults.raise_any()
        recipe = self.loaded.recipe
        sections = {name: getattr(recipe, name).model_copy(update=change) for name, change in self.changes.items() if name}
        recipe = recipe.model_copy(update=sections | self.changes.get("", {}))
        return replace(self.loaded, recipe=recipe, origins=self.origins, notes=self.notes)


def resolve(loaded: Loaded, data_size: int | None = None) -> Loaded:
    """Fills in every default that depends on other keys, and checks that the keys fit each other.

    Args:
        data_size: ranks that read different rows. None: not known yet; derived for one, and only what no number of
            ranks could mend is an error. Resolving again for another number re-derives what the user did not give.

    Raises:
        RecipeError: lists all keys that do not fit each other.
    """
    draft = _Draft(_imply_lora(loaded))
    _fill_batch(draft, data_size)
    _fill_defaults(draft)
    _check_names(draft)
    _check_method(draft)
    _check_rhythms(draft)
    _note_splits(draft)
    return draft.done()


def _imply_lora(loaded: Loaded) -> Loaded:
    """An existing adapter says itself how it is made: going on from it needs no lora section."""
    if loaded.recipe.lora or not loaded.recipe.model.adapter:
        return loaded
    recipe = loaded.recipe.model_copy(update={"lora": LoraSection()})
    return replace(loaded, recipe=recipe, origins=loaded.origins | {"lora": "method: model.adapter"})


def _fill_defaults(draft: _Draft) -> None:
    recipe, method = draft.loaded.recipe, draft.loaded.method
    if recipe.lora and not recipe.model.adapter:
        draft.fill("lora.alpha", 2 * recipe.lora.rank, "default: 2 * lora.rank")
    draft.fill("train.learning_rate", {"lora": 2e-4, "dora": 1e-4}.get(method, 1e-5), f"method: {method}")
    draft.fill("export.formats", ["adapter" if recipe.lora else "merged"], f"method: {method}")
    draft.fill("eval.per_device_eval_batch_size", draft[MICRO], f"derived: {MICRO}")
    if draft.given("eval.eval_steps"):
        draft.fill("eval.eval_strategy", "steps", "derived: eval.eval_steps")
    elif _has_eval_rows(recipe):
        draft.fill("eval.eval_strategy", "epoch", "default: there is eval data")
    else:
        draft.fill("eval.eval_strategy", "no", "default: no eval data")
    if draft.given("checkpoint.save_steps"):
        draft.fill("checkpoint.save_strategy", "steps", "derived: checkpoint.save_steps")
    name = Path(draft.loaded.path).stem if draft.loaded.path else "recipe"
    draft.fill("output", f"runs/{name}", "default: the recipe's name")


def _has_eval_rows(recipe: Recipe) -> bool:
    return bool(recipe.data.eval or recipe.data.eval_split)


def _fill_batch(draft: _Draft, data_size: int | None) -> None:
    """global_batch_size = per_device_train_batch_size x gradient_accumulation_steps x ranks, whichever of them are given.

    A micro-batch holds at most the per-device size: where the rows of a step do not divide evenly, the last one is smaller.
    """
    ranks = data_size or 1
    if not draft.given(MICRO):
        fits = draft.given(TOTAL) and draft.given(STEPS) and draft[TOTAL] % (draft[STEPS] * ranks) == 0
        size, origin = (draft[TOTAL] // (draft[STEPS] * ranks), f"derived: {TOTAL} / {STEPS}") if fits else (1, "default")
        draft.fill(MICRO, size, origin)
    micro = draft[MICRO]
    if not draft.given(STEPS):
        draft.fill(TOTAL, DEFAULT_GLOBAL_BATCH_SIZE, "default")
        total = draft[TOTAL]
        if micro > total:
            default = "" if draft.given(TOTAL) else " (its default)"
            draft.fault(MICRO, f"{micro} is more than {TOTAL}: {total}{default}.", f"Set {TOTAL} to {micro} or more.")
        draft.fill(STEPS, ceil(total / (micro * ranks)), f"derived: {total} rows / ({micro} x {_processes(ranks)})")
        return
    steps = draft[STEPS]
    product = micro * steps * ranks
    draft.fill(TOTAL, product, f"derived: {micro} x {steps} x {_processes(ranks)}")
    total = draft[TOTAL]
    if data_size is None and total != product and total % product == 0:
        note = f"{TOTAL}: {total} needs {total // product} processes, with {MICRO}: {micro} and {STEPS}: {steps}."
        draft.notes += [note] * (note not in draft.notes)
    elif total != product:
        what = (
            f"{total}, {MICRO}: {micro} and {STEPS}: {steps} do not agree: {micro} x {steps} x {_processes(ranks)} = {product}."
        )
        draft.fault(TOTAL, what, "Leave one of the three out; it follows from the others.")


def _processes(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} processes"


def _check_names(draft: _Draft) -> None:
    recipe = draft.loaded.recipe
    if recipe.plugins and not draft.loaded.plugins:
        return  # not run, so their names are not known
    named: list[tuple[str, str | None, tables.Table]] = [
        ("strategy.name", recipe.strategy.name, tables.STRATEGIES),
        ("train.objective", recipe.train.objective, tables.OBJECTIVES),
        ("data.format", recipe.data.format, tables.FORMATS),
    ]
    named += [("export.formats", name, tables.EXPORTERS) for name in draft["export.formats"]]
    for part in ("train", "eval"):
        sources = enumerate(getattr(recipe.data, part))
        named += [(f"data.{part}.{i}.format", source.format, tables.FORMATS) for i, source in sources]
    for key, name, table in named:
        legal = ["auto", *table] if key.startswith("data.") else list(table)
        if name is not None and name not in legal:
            draft.fault(key, f"unknown name '{name}'.{nearest(name, legal)}", f"Known: {', '.join(legal)}.")


def packed_faults(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """What a recipe asks for that a base of packed weights cannot give: key, fault, and what to change."""
    if not recipe.quantize:
        return
    if not recipe.lora and recipe.model.adapter is None:
        what = "without a lora section every weight is trained, and packed ones cannot be."
        yield "quantize", what, "Add `lora: {rank: 16}`."
    if recipe.lora and recipe.lora.use_dora:
        yield "lora.use_dora", "DoRA reads the base weights in every step; packed ones do not allow it.", "Leave one out."
    if recipe.lora and recipe.lora.splits:
        what = f"a packed base cannot give up what {recipe.lora.init} takes out of it."
        yield "lora.init", what, "Leave quantize out, or use init: default."


def _check_method(draft: _Draft) -> None:
    recipe = draft.loaded.recipe
    if not recipe.data.train:
        draft.fault("data.train", "missing.", "Write `data: file.jsonl`.")
    if recipe.lora and recipe.train.trainable:
        draft.fault("train.trainable", "partial full tuning and a lora section exclude each other.", "Keep one of them.")
    for key, what, fix in packed_faults(recipe):
        draft.fault(key, what, fix)
    if recipe.quantize and recipe.quantize.double_quant and recipe.quantize.method != "nf4":
        draft.fault("quantize.double_quant", "fp8 has one scale a row, which is not worth packing.", "Remove it.")
    if recipe.lora and recipe.lora.init == "qera" and not recipe.quantize:
        draft.fault("lora.init", "'qera' gives back what packing took, and nothing is packed.", "Add `quantize: nf4`.")
    if recipe.lora and not recipe.lora.starts_at_base and recipe.model.adapter:
        what = f"'{recipe.lora.init}' begins a new adapter, and model.adapter goes on from one."
        draft.fault("lora.init", what, "Keep one of them.")
    if recipe.train.objective == "dpo":
        draft.fill("train.dpo_beta", 0.1, "default")
    elif draft.given("train.dpo_beta"):
        draft.fault("train.dpo_beta", f"not used by train.objective '{recipe.train.objective}'.", "Remove it, or set dpo.")
    if "adapter" in draft["export.formats"] and not recipe.lora:
        draft.fault("export.formats", "'adapter' needs a lora section.", "Write `export: merged`.")
    joined = "data.packing" if recipe.data.packing else "data.padding_free" if recipe.data.padding_free else None
    if recipe.data.packing and recipe.data.padding_free:
        draft.fault("data.padding_free", "packs leave nothing to pad.", "Keep one of packing and padding_free.")
    if recipe.data.packing and recipe.data.train_sampling_strategy == "group_by_length":
        draft.fault("data.train_sampling_strategy", "packs are all of one length.", "Use random or sequential with packing.")
    if joined and recipe.train.neftune_noise_alpha:
        draft.fault(
            "train.neftune_noise_alpha", f"the noise is scaled by a row's length, which {joined} hides.", "Leave one out."
        )
    if recipe.strategy.wrap and recipe.strategy.name == "none":
        draft.fault("strategy.wrap", "nothing is sharded by strategy none.", "Write `name: fsdp`, or leave wrap out.")


def _check_rhythms(draft: _Draft) -> None:
    """When to evaluate, to save and to warm up; the best checkpoint needs both of the first two at the same step."""
    for key in ("train.warmup_steps", "eval.eval_steps", "checkpoint.save_steps", "data.eval_split"):
        value = draft[key]
        if value is not None and value > 1 and value != int(value):
            draft.fault(key, f"{value:g} is neither a whole number nor a share below 1.", f"Write {round(value)}, or a share.")
    best, strategy = "checkpoint.metric_for_best_model", "eval.eval_strategy"
    if not _has_eval_rows(draft.loaded.recipe):
        wants = {
            strategy: draft[strategy] != "no",
            "eval.eval_steps": True,
            "eval.eval_on_start": draft["eval.eval_on_start"],
            best: True,
        }
        for key in wants:
            if draft.given(key) and wants[key]:
                draft.fault(key, "there are no rows to evaluate on.", "Give data.eval or data.eval_split.")
        return
    for rhythm, steps in ((strategy, "eval.eval_steps"), ("checkpoint.save_strategy", "checkpoint.save_steps")):
        if draft[rhythm] == "steps" and draft[steps] is None:
            draft.fault(rhythm, f"'steps' needs {steps}.", f"Write `{steps.rpartition('.')[2]}: 50`.")
        elif draft[rhythm] != "steps" and draft[steps] is not None:
            draft.fault(steps, f"not used while {rhythm} is '{draft[rhythm]}'.", f"Set {rhythm}=steps, or {steps}=null.")
    if draft.given(best):
        for rhythm in (strategy, "checkpoint.save_strategy"):
            if draft[rhythm] == "no":
                draft.fault(
                    best, f"no checkpoint can be the best one while {rhythm} is 'no'.", f"Set {rhythm}, or leave this key out."
                )
    _check_best(draft)


def _note_splits(draft: _Draft) -> None:
    """Says aloud what ends the promise that every split of a step's rows learns the same."""
    for key in ("train.neftune_noise_alpha", "train.router_aux_loss_coef"):
        note = f"{key}: with it, how a step's rows are split over forward passes and ranks changes what is learned."
        if draft[key] and note not in draft.notes:
            draft.notes.append(note)


def _check_best(draft: _Draft) -> None:
    every, saved = draft["eval.eval_steps"], draft["checkpoint.save_steps"]
    if every and saved and (every < 1) == (saved < 1):  # a share against a number of steps shows once the plan is known
        ratio = max(every, saved) / min(every, saved)
        if abs(ratio - round(ratio)) > 1e-9:
            draft.fault(
                "checkpoint.save_steps",
                f"{saved:g} does not fit eval.eval_steps: {every:g}; the best checkpoint is one that is evaluated and saved.",
                "Make one of them a multiple of the other.",
            )
