"""Loads a model's tokenizer from local files, adds tokens to it, and writes it out with as few changes as can be.

Files that need no change are copied byte for byte: converters recognise tokenizers by their bytes, and other library versions
misread what this one would write anew. Where tokens were added, only their entries are put into the base's own files.
"""

import json
import re
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from swiftlite.models.files import ModelFiles, read_json
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import ModelSection

_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*", "normalizer.json"),
    *("vocab.*", "merges.txt", "*.model", "*.model.v*", "*.tiktoken", "tekken.json"),
)
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_SPECIAL = re.compile(r"<.+>|\[.+\]", re.DOTALL)
# Tokens that publishers keep for padding, where the tokenizer's own files forget to say so.
_PADDING = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|endoftext|>", "<unk>")


def load_tokenizer(files: ModelFiles, section: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer with `model.add_tokens` added and a padding token named. Asks no network.

    Padding takes an id that exists already; no token and no embedding row is ever added for it.

    Raises:
        ModelError: when the files make no tokenizer.
        RecipeError: when a token of `model.add_tokens` cannot be added.
    """
    folder = str(files.folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=files.remote_code)
    except Exception as error:  # the libraries raise whatever their parsers do
        if files.remote_code or "trust_remote_code" not in str(error) or not (files.folder / "tokenizer.json").exists():
            raise ModelError(
                f"no tokenizer can be loaded: {str(error).strip().splitlines()[0]}", where=folder, fix="Fetch its files again."
            ) from error
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True
        )  # tokenizer.json says all, without code
    add_tokens(tokenizer, section.add_tokens)
    _name_padding(tokenizer)
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Adds tokens in the given order; ids go on at the end of the vocabulary. A token that exists keeps its id.

    `<...>` and `[...]` become special (dropped by `skip_special_tokens`), others stay text. All match raw text as written.

    Raises:
        RecipeError: an empty token, one given twice, or one that the tokenizer does not take.
    """
    from tokenizers import AddedToken

    for place, token in enumerate(tokens):
        where = f"model.add_tokens[{place}]"
        if not token.strip():
            raise RecipeError(f"{token!r} is no token", where=where, fix="Take it out.")
        if token in tokens[:place]:
            raise RecipeError(f"{token!r} is given twice", where=where, fix="Take one out.")
        vocab = tokenizer.get_vocab()
        special = _SPECIAL.fullmatch(token) is not None
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)], special_tokens=special)
        got = tokenizer.get_vocab().get(token)
        if got is None or got != vocab.get(token, got) or (token not in vocab and got in vocab.values()):
            # The library counts tokens to find the next id, which another token may have where the vocabulary has holes.
            raise RecipeError(f"the tokenizer has no free id for {token!r}", where=where, fix="Use tokens that the model has.")


def added_token_ids(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[int]:
    """Ids of `model.add_tokens`, in that order; those that the base had already are among them."""
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens))
    return list(ids)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to fill rows with: any valid one does, since padding is masked by position."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)


def _name_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token is not None:
        return
    added = {str(t) for t in tokenizer.added_tokens_decoder.values()}  # naming a piece of text would make decoding drop it
    ends = [t for t in (tokenizer.unk_token, tokenizer.eos_token) if t]
    choice = next((t for t in (*_PADDING, *ends) if t in added and t != tokenizer.eos_token), tokenizer.eos_token)
    if choice is not None:
        tokenizer.pad_token = choice


def _rows(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def new_rows(vocab_rows: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows embeddings of `vocab_rows` rows lack for the tokenizer's highest id. 0 where it fits: none is ever cut."""
    return max(0, _rows(tokenizer) - vocab_rows)


@torch.no_grad()
def init_new_rows(weight: Tensor, first_new: int, seed: int) -> None:
    """Fills rows `first_new:` of an embedding or head matrix [rows, hidden] (or bias [rows]) in place, from the rows before.

    New row = mean + half a standard deviation of noise, each per column: close to the mean, so that a new token is neither likely
    nor loud, and of the length that rows have where their mean is near zero. Depends on the seed alone, not on device or dtype.
    """
    old, count = weight[:first_new], len(weight) - first_new
    if count <= 0:
        return
    total = torch.zeros(old.shape[1:], dtype=torch.float64)
    square = torch.zeros_like(total)
    for start in range(0, first_new, 8192):  # a whole vocabulary in float64 would be four times the matrix
        rows = old[start : start + 8192].to("cpu", torch.float64)
        total += rows.sum(0)
        square += (rows * rows).sum(0)
    mean = total / first_new
    deviation = (square / first_new - mean * mean).clamp_min(0).sqrt()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *old.shape[1:], generator=generator, dtype=torch.float64)
    weight[first_new:] = (mean + 0.5 * deviation * noise).to(weight.device, weight.dtype)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, value: str) -> str:
    """Replaces the chat template by a Jinja file, or by `value` itself where it is Jinja text; returns the template.

    Raises:
        RecipeError: no such file, not readable, or not valid Jinja; names the line.
    """
    from jinja2 import Environment, TemplateSyntaxError

    where = "data.chat_template"
    text = value
    if "{" not in value:
        path = Path(value).expanduser()
        if not path.is_file():
            raise RecipeError(
                f"{value!r} does not exist, and is no Jinja text", where=where, fix="Give a .jinja file or the template itself."
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{value!r} cannot be read: {error}", where=where, fix="Give a text file.") from error
    try:  # `generation` is transformers' own tag: it marks the assistant's tokens and renders nothing
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", text))
    except TemplateSyntaxError as error:
        raise RecipeError(
            f"the template is no valid Jinja, line {error.lineno}: {error.message}", where=where, fix="Mend that line."
        ) from error
    tokenizer.chat_template = text
    return text


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, files: ModelFiles, out_folder: Path, *, changed: bool, chat_template: str | None
) -> None:
    """Writes the tokenizer's files.

    Args:
        changed: tokens were added. Without it, all but the chat template are byte-equal copies of the base's files.
        chat_template: the template that replaces the base's; None keeps it.

    Raises:
        ModelError: when the written files give an added token another id.
    """
    out_folder.mkdir(parents=True, exist_ok=True)
    own = [p for p in sorted(files.folder.iterdir()) if p.is_file() and _is_tokenizer_file(p.name, files)]
    for path in own:
        shutil.copyfile(path, out_folder / path.name)  # follows the links of the hub's cache
    if (files.folder / _MORE_TEMPLATES).is_dir() and chat_template is None:
        shutil.copytree(files.folder / _MORE_TEMPLATES, out_folder / _MORE_TEMPLATES, dirs_exist_ok=True)
    if changed:
        _write_added(tokenizer, out_folder)
    if chat_template is not None:
        _write_template(chat_template, out_folder)


def _is_tokenizer_file(name: str, files: ModelFiles) -> bool:
    return any(fnmatch(name, pattern) for pattern in _FILES) or (files.remote_code and name.endswith(".py"))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_added(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Puts all tokens that the base's files lack into them, each with its id and special flag."""
    tokens = {
        i: {key: getattr(t, key) for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
        for i, t in sorted(tokenizer.added_tokens_decoder.items())
    }
    file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else None
    if file.exists():
        whole = read_json(file)
        there = {t["id"] for t in whole.get("added_tokens") or []}
        whole["added_tokens"] = [
            *(whole.get("added_tokens") or []),
            *({"id": i, **t} for i, t in tokens.items() if i not in there),
        ]
        _write_json(file, whole)
    else:  # a vocabulary of the older, slow kind: the file that says all is written anew
        tokenizer.save_pretrained(folder)
        _compatible(config_file)
    if config is not None:
        _write_json(config_file, _with_decoder(config, tokens, folder))
    legacy = folder / "added_tokens.json"
    if legacy.exists():
        _write_json(legacy, {**read_json(legacy), **{t["content"]: i for i, t in tokens.items() if i >= tokenizer.vocab_size}})
    _require_same_ids(tokenizer, file, tokens)


def _compatible(config_file: Path) -> None:
    """Takes what only transformers 5 can read out of a config that it wrote."""
    config = read_json(config_file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    _write_json(config_file, config)


def _with_decoder(config: dict[str, Any], tokens: dict[int, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The base's config with the tokens in it; class and layout stay as they are."""
    known = config.get("added_tokens_decoder")
    if known is None and (folder / "special_tokens_map.json").exists():
        # transformers reads that map only where there is no decoder: what it alone names moves over.
        named = read_json(folder / "special_tokens_map.json")
        lone = {
            k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if k not in config and k.endswith("_token")
        }
        config = {**config, **lone}
    return {**config, "added_tokens_decoder": {**{str(i): t for i, t in tokens.items()}, **(known or {})}}


def _require_same_ids(tokenizer: PreTrainedTokenizerBase, file: Path, tokens: dict[int, dict[str, Any]]) -> None:
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(file))
    moved = [t["content"] for i, t in tokens.items() if written.token_to_id(t["content"]) != i]
    if moved:
        raise ModelError(
            f"the written tokenizer gives other ids to {', '.join(moved[:3])}",
            where=file,
            fix="Report this with the model's name.",
        )


def _write_template(template: str, folder: Path) -> None:
    """The new template in the file that transformers prefers, and wherever the base kept the old one for other readers."""
    (folder / _TEMPLATE).write_text(template, encoding="utf-8")
    shutil.rmtree(folder / _MORE_TEMPLATES, ignore_errors=True)
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if path.exists() and "chat_template" in (config := read_json(path)):
            _write_json(path, {**config, "chat_template": template})


__all__ = [
    "add_tokens",
    "added_token_ids",
    "init_new_rows",
    "load_tokenizer",
    "new_rows",
    "pad_id",
    "save_tokenizer",
    "set_chat_template",
]
