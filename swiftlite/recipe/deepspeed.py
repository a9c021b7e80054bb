"""`strategy.config`: a DeepSpeed JSON, read into recipe keys, so that nothing behind the loading of a recipe knows of it.

Keys that change what is learned, or where things lie, are taken over or refused by name; those that tune or print inside
DeepSpeed alone are named in one note. An absent key and `auto` leave it to the recipe. The rules are tables: `deepspeed_keys`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from swiftlite.recipe.aliases import spoken
from swiftlite.recipe.deepspeed_keys import (
    ACTIVATIONS,
    ADAM,
    FP16,
    KNOWN,
    NO_EFFECT,
    ONLY,
    RATE,
    REFUSED,
    SCALE,
    SECTIONS,
    TAKEN,
    WORDS,
    ZERO,
)  # fmt: skip
from swiftlite.recipe.errors import RecipeError, nearest
from swiftlite.recipe.overrides import WHERE
from swiftlite.recipe.reading import Faults, Node, Scalar, number, parse
from swiftlite.recipe.writing import flow


@dataclass
class _Config:
    """One file on its way into a recipe.

    Attributes:
        found: what it says, by DeepSpeed key.
        taken: what that is here, by our key; `key` and `where` of the nodes are those of the file.
        unused: keys without effect.
    """

    label: str
    recipe: Node
    faults: Faults
    notes: list[str]
    found: dict[str, Node] = field(default_factory=dict)
    taken: dict[str, Node] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def put(self, key: str, value: Scalar, node: Node) -> None:
        """Says one of our keys, unless another key of the file says it differently."""
        other = self.taken.setdefault(key, replace(node, value=value))
        if not _same(other.value, value):
            what = f"{_shown(node)} contradicts {other.key}: {other.text} ({other.where})."
            self.faults.at(node, what, fix="Keep one of them.")

    def given(self, key: str) -> Scalar:
        """A scalar that the recipe itself says, or None."""
        section, _, name = key.partition(".")
        holder = self.recipe.value.get(section) if isinstance(self.recipe.value, dict) else None
        node = holder.value.get(name) if holder and isinstance(holder.value, dict) else None
        return None if node is None or isinstance(node.value, dict | list) else node.value

    def refuse(self, node: Node, fix: str) -> None:
        self.faults.at(node, f"{_shown(node)} is not possible here.", fix=fix)

    def word(self, path: str) -> Scalar:
        """Our word for what a key says; None where it is absent or was refused."""
        node = self.found.get(path)
        if node is None:
            return None
        words, fix = WORDS[path]
        if isinstance(node.value, dict | list) or spoken(node) not in words:
            self.refuse(node, fix)
            return None
        return words[spoken(node)]

    def flag(self, path: str) -> bool | None:
        node = self.found.get(path)
        if node is not None and not isinstance(node.value, bool):
            self.faults.at(node, f"expected true or false, got {_shown(node)}.")
            return None
        return None if node is None else bool(node.value)


def apply(root: Node, faults: Faults, notes: list[str]) -> dict[str, str]:
    """Lays what the file of `strategy.config` says into a tree that has our names, in place. All its faults are collected.

    A key that the recipe says otherwise is a fault; one of the command line beats the file, with a note.

    Returns:
        Origins, `file: DeepSpeed key`, of the keys that it set.
    """
    strategy = root.value.get("strategy") if isinstance(root.value, dict) else None
    named = strategy.value.get("config") if strategy and isinstance(strategy.value, dict) else None
    if named is None or not isinstance(named.value, str):
        return {}
    config = _Config(named.value, root, faults, notes)
    try:
        tree = _read(named.value, named, faults)
    except RecipeError as error:
        faults.items.append(error)
        return {}
    _walk(config, tree, "")
    for path, key in TAKEN.items():
        if node := config.found.get(path):
            value = config.word(path) if path in WORDS else node.value
            if isinstance(value, dict | list):
                faults.at(node, f"expected one value, got {_shown(node)}.")
            elif value is not None:
                config.put(key, value, node)
    for group in (_shard, _offload, _precision, _optimizer, _scheduler, _checkpointing):
        group(config)
    origins = _lay(config)
    if config.unused:
        notes.append(f"{config.label}: without effect here: {', '.join(dict.fromkeys(config.unused))}.")
    return origins


def _read(name: str, named: Node, faults: Faults) -> Node:
    """The tree of a JSON file, which may have comments (`//`, `#`, `/* */`) and trailing commas."""
    try:
        text = Path(name).expanduser().read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not UTF-8 text"
        fix = "A relative path starts at the working folder."
        raise RecipeError(f"{named.key}: '{name}' {why}.", where=named.where, fix=fix) from None
    for loose in (r"//[^\n]*|#[^\n]*|/\*.*?\*/", r",(?=\s*[}\]])|\t"):  # blanks in their place keep the numbers of lines
        pattern = re.compile(rf'("(?:\\.|[^"\\\n])*")|{loose}', re.DOTALL)
        text = pattern.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    try:
        whole = isinstance(json.loads(text), dict)
    except json.JSONDecodeError as error:
        raise RecipeError(f"not valid JSON: {error.msg}.", where=f"{name}:{error.lineno}") from None
    if not whole:
        raise RecipeError("a DeepSpeed configuration is a JSON object.", where=name, fix="Begin it with '{'.")
    return parse(text, name, faults)  # JSON is YAML, and this reader knows places


def _walk(config: _Config, section: Node, prefix: str) -> None:
    """Sorts the keys of one section by what becomes of them."""
    assert isinstance(section.value, dict)
    for name, node in section.value.items():
        path = f"{prefix}{'bf16' if not prefix and name == 'bfloat16' else name}"
        if path not in KNOWN | SECTIONS:
            here = [known[len(prefix) :] for known in KNOWN | SECTIONS if known.startswith(prefix)]
            close = nearest(name, sorted(other for other in here if "." not in other)).strip()
            config.faults.at(node, "unknown key.", fix=close or "Leave it out if it is not DeepSpeed's.")
        elif node.value in (None, "auto"):
            continue
        elif path in SECTIONS:
            _enter(config, node, path)
        elif path in NO_EFFECT or (path in ONLY and node.value in ONLY[path][0]):
            config.unused.append(path)
        elif path in ONLY:
            config.refuse(node, ONLY[path][1])
        elif path not in REFUSED:
            config.found[path] = node
        elif _is_off(node):
            config.unused.append(path)
        else:
            config.faults.at(node, "not offered here.", fix=REFUSED[path])


def _enter(config: _Config, node: Node, path: str) -> None:
    if not isinstance(node.value, dict):
        config.faults.at(node, f"expected a section, got {_shown(node)}.")
        return
    kind = node.value.get("type")
    known = {"auto", "null", *WORDS.get(f"{path}.type", ({}, ""))[0]}
    if f"{path}.type" in WORDS and kind is not None and spoken(kind) not in known:
        config.refuse(kind, WORDS[f"{path}.type"][1])  # its params are another kind's
    else:
        _walk(config, node, f"{path}.")


def _is_off(node: Node) -> bool:
    """Whether a section says `enabled: false`, itself or in all its parts; an empty one says nothing, which is the same."""
    if not isinstance(node.value, dict):
        return node.value is False
    own = node.value.get("enabled")
    found = [own.value] if own is not None else list(_enabled(node))
    return not node.value or (bool(found) and not any(found))


def _enabled(node: Node) -> Iterator[object]:
    if isinstance(node.value, dict):
        for name, inner in node.value.items():
            yield from [inner.value] if name == "enabled" else _enabled(inner)


def _shard(config: _Config) -> None:
    """MiCS is hsdp: weights, gradients and optimizer are shared inside a group, and each group has all of them."""
    size, stage = config.found.get(f"{ZERO}.mics_shard_size"), config.found.get(f"{ZERO}.stage")
    if size is None:
        return
    if not isinstance(size.value, int) or size.value < 1:  # -1 is off
        config.unused.append(f"{ZERO}.mics_shard_size")
    elif stage is None or stage.value != 3:
        config.refuse(size, f"Set {ZERO}.stage to 3.")
    else:
        config.taken["strategy.name"] = replace(size, value="hsdp")
        config.put("strategy.shard", size.value, size)


def _offload(config: _Config) -> None:
    nodes, said = {}, {}
    for part, legacy in (("param", ("cpu_offload_param", "cpu_offload_params")), ("optimizer", ("cpu_offload",))):
        device = f"{ZERO}.offload_{part}.device"
        if (word := config.word(device)) is not None:
            nodes[part], said[part] = config.found[device], word
        for name in legacy:
            if (flag := config.flag(f"{ZERO}.{name}")) is not None:
                nodes.setdefault(part, config.found[f"{ZERO}.{name}"])
                said.setdefault(part, "cpu" if flag else "none")
    if said.get("param") == "cpu":
        if said.get("optimizer") == "cpu":
            config.put("strategy.offload", "params", nodes["param"])
        else:
            config.refuse(nodes["param"], f"Set {ZERO}.offload_optimizer.device to cpu too: optimizer state goes with weights.")
    elif "optimizer" in said:
        config.put("strategy.offload", "optimizer" if said["optimizer"] == "cpu" else "none", nodes["optimizer"])
    elif "param" in said:
        config.unused.append(f"{ZERO}.offload_param.device")


def _precision(config: _Config) -> None:
    said = {name: config.flag(f"{name}.enabled") for name in ("bf16", FP16)}
    for name, flag in said.items():
        if flag:
            config.put("train.precision", name, config.found[f"{name}.enabled"])
        elif flag is False and all(other is False for other in said.values()):
            config.put("train.precision", "fp32", config.found[f"{name}.enabled"])
        elif flag is False and config.given("train.precision") == name:
            config.put("train.precision", f"not {name}", config.found[f"{name}.enabled"])
        elif flag is False:
            config.unused.append(f"{name}.enabled")
    taken = config.taken.get("train.precision")
    used = (config.given("train.precision") or (taken and taken.value)) == FP16
    for name, (least, most) in SCALE.items():
        node = config.found.get(f"{FP16}.{name}")
        if node is None:
            continue
        fits = isinstance(node.value, int | float) and least <= node.value <= most
        if used and not fits:
            fix = "Leave it out: the scale begins at 2**16, doubles after 2,000 good steps and halves at an overflow."
            config.refuse(node, fix)
        else:
            config.unused.append(f"{FP16}.{name}")


def _optimizer(config: _Config) -> None:
    betas, kind = config.found.get(f"{ADAM}.betas"), config.found.get("optimizer.type")
    if betas is not None:
        pair = betas.value if isinstance(betas.value, list) else []
        if len(pair) != 2:
            config.faults.at(betas, "expected a list of two numbers.", fix="Write [0.9, 0.999].")
        for beta, key in zip(pair, ("train.adam_beta1", "train.adam_beta2"), strict=False):
            if not isinstance(beta.value, dict | list) and beta.value != "auto":
                config.put(key, beta.value, beta)
    decoupled = config.flag(f"{ADAM}.adam_w_mode")  # which DeepSpeed asks of Adam alone
    if decoupled is False and kind is not None and spoken(kind) == "adam":
        config.refuse(config.found[f"{ADAM}.adam_w_mode"], "Write true: weight decay is decoupled, as AdamW has it.")
    elif decoupled is not None:
        config.unused.append(f"{ADAM}.adam_w_mode")


def _scheduler(config: _Config) -> None:
    """The shapes are ours. DeepSpeed's are a step late, and its first two steps have a rate of 0; ours has no such step."""
    kind, steps = config.found.get("scheduler.type"), config.found.get(f"{RATE}.warmup_num_steps")
    if steps is not None and not (isinstance(steps.value, int) and steps.value >= 0):
        config.taken.pop("train.warmup_steps", None)  # a share would be another thing
        config.faults.at(steps, f"expected a whole number of steps, got {_shown(steps)}.")
    elif kind is not None and config.word(f"{RATE}.warmup_type") is None and f"{RATE}.warmup_type" not in config.found:
        what = "DeepSpeed's warm-up is logarithmic unless warmup_type says linear; ours is linear"
        if steps is None:
            config.notes.append(f"{config.label}: {kind.key}: {what}.")
        elif steps.value:
            config.faults.at(steps, f"{what}.", fix='Write "warmup_type": "linear" beside it.')
    if kind is not None and spoken(kind) == "warmupdecaylr":
        config.put("train.min_lr_ratio", 0, kind)
    total = config.found.get(f"{RATE}.total_num_steps")
    if total is not None and not _same(total.value, config.given("train.max_steps")):
        what = f"{_shown(total)} is not the recipe's train.max_steps."
        config.faults.at(total, what, fix='Write "auto": the rate falls until the last step.')


def _checkpointing(config: _Config) -> None:
    on, partition = (config.flag(f"{ACTIVATIONS}.{name}") for name in ("enabled", "partition_activations"))
    if on is not None:
        config.put("train.gradient_checkpointing", "full" if on else "none", config.found[f"{ACTIVATIONS}.enabled"])
    elif partition:
        config.put("train.gradient_checkpointing", "full", config.found[f"{ACTIVATIONS}.partition_activations"])
    if partition is not None and (on is not None or not partition):
        config.unused.append(f"{ACTIVATIONS}.partition_activations")


def _lay(config: _Config) -> dict[str, str]:
    """Puts what was taken into the recipe's tree, where the recipe does not say it."""
    origins: dict[str, str] = {}
    assert isinstance(config.recipe.value, dict)
    for key, node in config.taken.items():
        section, _, name = key.partition(".")
        holder = config.recipe.value.setdefault(section, Node({}, config.label, section))
        holder.value = {} if holder.value is None else holder.value
        if not isinstance(holder.value, dict):
            continue
        given = holder.value.get(name)
        if given is None or (given.value is None and given.where != WHERE):
            holder.value[name] = node
            origins[key] = f"{config.label}: {node.key}"
        elif _same(given.value, node.value):
            continue
        elif given.where == WHERE:
            config.notes.append(f"{key}: {given.text} of the command line beats {node.key}: {_shown(node)} ({node.where}).")
        else:
            what = f"{_shown(given)} here, and {node.key}: {node.text} ({node.where}) says {key}: {flow(node.value)}."
            config.faults.at(given, what, fix="Keep one of them.")
    return origins


def _shown(node: Node) -> str:
    return node.text or ("a section" if isinstance(node.value, dict) else "a list")


def _same(one: object, other: object) -> bool:
    """Whether two values mean the same; `2` and `2.0` do, and a number in quotes."""
    one, other = (number(value) if isinstance(value, str) and number(value) is not None else value for value in (one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)
