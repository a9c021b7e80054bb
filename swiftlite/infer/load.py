"""Opens a target for use: plain transformers modules, peft layers where there is an adapter, and the template of training."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.render import Renderer
from swiftlite.data.template import template_text
from swiftlite.dist.world import pick_device
from swiftlite.infer.locate import Place, locate
from swiftlite.infer.model import attach, load_full, load_plain, pick_dtype
from swiftlite.models.adapters import read_adapter_config
from swiftlite.models.build import DTYPES, load_config
from swiftlite.models.files import TOKENIZER_FILES, ModelFiles, read_json
from swiftlite.models.prequantised import quantization_config
from swiftlite.models.sources import HUBS, resolve_model
from swiftlite.models.tokenizer import load_tokenizer, new_rows
from swiftlite.recipe.errors import DataError, ModelError, RecipeError, nearest
from swiftlite.recipe.schema import DataSection, ModelSection, Recipe
from swiftlite.recipe.writing import public

DEVICES = ("auto", "cuda", "mps", "cpu")


@dataclass(frozen=True)
class Target:
    """A model ready to answer.

    Attributes:
        model: the Hugging Face model in eval mode, with peft layers where there is an adapter.
        renderer: from messages to ids, by the template that the model was trained with.
        stop_ids: tokens that end an answer.
        description: what was loaded, for a person.
        notes: what a person should know about it.
        data: the data section of the run's recipe, where the target belongs to a run.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    stop_ids: frozenset[int]
    description: str
    notes: list[str] = field(default_factory=list)
    data: DataSection | None = None

    @property
    def positions(self) -> int | None:
        """Tokens that fit the model, prompt and answer together; None where it has no limit."""
        limit: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def lines(self) -> list[str]:
        """What was loaded, for a person."""
        return [self.description, *(f"note: {note}" for note in self.notes)]


def load_target(
    target: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    base: str | None = None,
    trust_remote_code: bool = False,
    hub: str = "hf",
) -> Target:
    """Loads a run, a checkpoint, an adapter or a model (folder, hub id, GGUF file, package://). Local ones need no network.

    Args:
        device: auto, cuda, mps or cpu. A model that does not fit the first GPU is spread over all of them.
        dtype: auto, bf16, fp16 or fp32. auto: fp32 on a CPU, else the type of the model's files.
        base: replaces the base model that an adapter names.

    Raises:
        ModelError: nothing to load, or an adapter and a base that do not fit each other.
        RecipeError: no such device, dtype or hub.
    """
    chosen, place = _device(device, dtype, hub), locate(target)
    own: dict[str, Any] = {"hub": hub, "trust_remote_code": trust_remote_code}
    if place.kind != "model" and place.recipe is not None:
        # What was trained is the base with these changes.
        given = place.recipe.model
        own |= {
            "add_tokens": given.add_tokens,
            "config_overrides": given.config_overrides,
            "hub": given.hub if hub == "hf" else hub,
        }
    lora, notes = read_adapter_config(place.name) if place.kind == "adapter" else (None, [])
    notes = place.notes + notes
    files, section = _base(place, lora, base, own)
    packing = place.recipe.quantize if place.kind == "adapter" and place.recipe is not None else None
    if packing is not None and not quantization_config(files.folder):
        beside = f"the adapter was trained beside {packing.method} weights and is used on the model's own"
        notes.append(f"{beside}: export_report.json tells the gap, and a merged export what export.onto says")
    config, _ = load_config(files, Recipe(model=section))
    config.use_cache = config.get_text_config().use_cache = True
    model = load_plain(files, config, chosen, pick_dtype(dtype, chosen, config), notes)
    tokenizer = _tokenizer(place, files, section, notes)
    if place.kind != "model" and (rows := new_rows(model.get_input_embeddings().weight.shape[0], tokenizer)):
        # Whatever stands in the new rows is replaced: what was trained brings them with it.
        model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + rows, mean_resizing=False)
    if lora is not None:
        attach(model, place.name, lora)
    elif place.kind == "full":
        load_full(model, Path(place.name))
    model.requires_grad_(False).eval()
    renderer = _renderer(tokenizer, place, model, notes)
    stops = _stop_ids(renderer, [Path(place.name), files.folder])
    # A clean one: transformers fills what a call leaves open from here, and bases ship sampling settings.
    model.generation_config = GenerationConfig(eos_token_id=sorted(stops) or None, pad_token_id=tokenizer.pad_token_id)
    what = {"model": "model", "adapter": "adapter", "full": "checkpoint"}[place.kind]
    on = f" on base {section.name}" if place.kind != "model" else ""
    name = str(model.dtype).removeprefix("torch.")
    said = f"{what} {place.name}{on} ({type(model).__name__}, {name}, {model.device.type})"
    return Target(model, tokenizer, renderer, stops, said, notes, place.recipe.data if place.recipe else None)


def _device(device: str, dtype: str, hub: str) -> torch.device:
    for key, value, known in (("dtype", dtype, ("auto", *DTYPES)), ("device", device, DEVICES), ("hub", hub, HUBS)):
        if value not in known:
            raise RecipeError(f"'{value}' is unknown.{nearest(value, known)}", where=key, fix=f"Known: {', '.join(known)}.")
    try:
        return pick_device(device)
    except RecipeError as error:
        raise RecipeError(error.what, where="device", fix="Use auto.") from error


def _base(place: Place, lora: Any, base: str | None, own: dict[str, Any]) -> tuple[ModelFiles, ModelSection]:
    """The files of the model itself, or of the one that an adapter or checkpoint was trained on."""
    if place.kind == "model":
        section = ModelSection(name=place.name, **own)
        return resolve_model(section), section
    if place.kind == "full" and place.recipe is None and base is None:
        fix = "Export it first: swiftlite export RUN --format merged. Or name its base with --base MODEL."
        raise ModelError("a checkpoint of full fine-tuning, without the recipe of its run", where=place.name, fix=fix)
    names = [base] if base else []
    if not names and lora is not None and lora.base_model_name_or_path:
        names.append(lora.base_model_name_or_path + (f"@{lora.revision}" if lora.revision else ""))
    if not base and place.recipe is not None:
        names.append(place.recipe.model.name)  # a cache folder or a relative path may be gone, the recipe's own name not
    first: ModelError | None = None
    for name in dict.fromkeys(names):
        section = ModelSection(name=name, **own)
        try:
            return resolve_model(section), section
        except ModelError as error:
            first = first or error
    if first is None:
        raise ModelError("the adapter does not name its base model", where=place.name, fix="Name it with --base MODEL.")
    what = f"the base model {names[0]} of this {'adapter' if lora is not None else 'checkpoint'} cannot be used: {first.what}"
    raise ModelError(what, where=place.name, fix="Name its base with --base MODEL (a folder, hub id or GGUF file).") from first


def _tokenizer(place: Place, files: ModelFiles, section: ModelSection, notes: list[str]) -> PreTrainedTokenizerBase:
    """The one saved beside the adapter, else the base's; always with the template that is saved beside the adapter."""
    folder = Path(place.name)
    beside = place.kind == "adapter"
    if beside and any((folder / name).is_file() for name in TOKENIZER_FILES):
        try:
            return load_tokenizer(ModelFiles(folder, str(folder), remote_code=files.remote_code), section)
        except ModelError as error:
            notes.append(f"the tokenizer beside the adapter cannot be loaded, the base's is used: {error.what}")
    tokenizer = load_tokenizer(files, section)
    if beside and (folder / "chat_template.jinja").is_file():
        tokenizer.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif place.kind != "model" and place.recipe is not None and place.recipe.data.chat_template:
        tokenizer.chat_template = template_text(place.recipe.data.chat_template)
    return tokenizer


def _renderer(tokenizer: PreTrainedTokenizerBase, place: Place, model: Any, notes: list[str]) -> Renderer:
    data = place.recipe.data if place.recipe else DataSection()
    if place.recipe and data.template_kwargs:
        shown = public(place.recipe)["data"]["template_kwargs"]  # without values of the environment
        notes.append(f"the chat template gets the run's template_kwargs {shown}")
    rows = max(model.config.get_text_config().vocab_size, len(tokenizer))
    renderer = Renderer(
        tokenizer,
        train_on=data.train_on,
        template_kwargs=data.template_kwargs,
        history_mismatch=data.history_mismatch,
        allow_control_tokens=data.allow_control_tokens,
        free_tokens=place.recipe.model.add_tokens if place.recipe else (),
        vocab_size=rows,
    )
    # End-of-turn tokens are known once a conversation has been rendered.
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    renderer.train_on = "assistant"
    try:
        renderer.sample(Conversation("probe", "chat", messages=turns))
    except (RowError, DataError) as error:
        notes.append(f"the chat template shows no end of an answer: {error}")
    renderer.train_on = data.train_on
    notes += renderer.notes
    return renderer


def _stop_ids(renderer: Renderer, folders: list[Path]) -> frozenset[int]:
    found: set[int] = set(renderer.stop_ids)
    for path in (folder / name for folder in folders for name in ("generation_config.json", "config.json")):
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        found |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return frozenset(found)
