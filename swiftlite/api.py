"""swiftlite from Python: what the verbs do, as functions for notebooks and scripts.

    from swiftlite import api
    recipe = api.load_recipe("quickstart", ["train.max_steps=20"])
    run = api.train(recipe)
    api.generate(run, ["Remind Ana to water the plants at 5 pm."])

A user's mistake raises a `swiftlite.recipe.errors.SwiftliteError`. Importing this is light: torch comes with the first call.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.load import Loaded, load_recipe

if TYPE_CHECKING:
    from swiftlite.infer.load import Target

__all__ = ["chat", "check", "download", "evaluate", "export", "generate", "load_recipe", "selftest", "train"]


def check(loaded: Loaded, *, dump: str | Path | None = None, nproc: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Everything that can be known before step 1, on a CPU, without weights: data, masks, adapters, steps, memory. Prints it.

    Args:
        loaded: what `load_recipe` gave.
        dump: file for one JSON line a training row, exactly as the model will get it: input_ids, labels (-100 where nothing is
            learned), position_ids, and source, the `file:line` of each piece.
        nproc: processes to plan for; default one for each GPU that is here.
        quiet: prints nothing.

    Returns:
        JSON-able: rows, steps, steps_per_epoch, warmup_steps, learning_rate, settled {key: {value, origin}} (what the recipe
        leaves to this machine and the model), reports (of the data, by set), coverage (parameters), memory (GiB), notes.

    Raises:
        RecipeError, DataError, ModelError: what `train` would stop at, with what to change.
    """
    from swiftlite.train.check import check as check_recipe
    from swiftlite.train.console import Console

    return check_recipe(loaded, Console(quiet=quiet), dump, nproc)


def train(loaded: Loaded) -> Path:
    """Trains, evaluates, saves and exports, and prints what happens. Returns the run's folder.

    Args:
        loaded: what `load_recipe` gave; `checkpoint.resume=auto` goes on with a run.

    Raises:
        RecipeError, DataError, ModelError: before step 1, with what to change.
        SwiftliteError: a loss that is not finite, a full disk.
        KeyboardInterrupt: after a signal, once a checkpoint is saved.
    """
    from swiftlite.train import session
    from swiftlite.train.console import Console

    return session.train(loaded, Console())


def export(
    run: str | Path,
    *,
    format: str,
    dtype: str = "auto",
    onto: str = "auto",
    output: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> Path:
    """Writes one format from a run or any of its checkpoints, opens it again and compares. Returns the folder that holds it.

    Args:
        run: the output folder of a run (its newest complete checkpoint is taken), or a checkpoint in it.
        format: adapter or merged.
        dtype: of merged weights: auto (the base's), bf16, fp16 or fp32.
        onto: after training with `quantize`, what merged weights start from: dequantised (what was trained on), original (the
            model's files), auto: whichever is closer to the trained model.
        output: the export goes to `output/<format>`, its receipt to `output/export_report.json`; None: the run's folder.
        overwrite: replace an earlier export there.
        device: auto, cuda, mps or cpu.

    Raises:
        RecipeError: an unknown format, dtype, onto or device, or a folder that may not be replaced.
        ModelError: the folder is no run, or the export differs from what was trained.
    """
    run = Path(run)
    root = run.parent.parent if run.parent.name == "checkpoints" else run
    if not (root / "recipe.yaml").is_file():
        fix = "Name the output folder of a run, or a checkpoint in it."
        raise ModelError("no run is in this folder: it has no recipe.yaml", where=run, fix=fix)
    given = {
        "export.formats": [format],
        "export.dtype": dtype,
        "export.onto": onto,
        "export.overwrite": overwrite,
        "train.device": device,
        "output": str(root),
    }
    loaded = load_recipe(str(root / "recipe.yaml"), [f"{key}={json.dumps(value)}" for key, value in given.items()])
    from swiftlite.train import session
    from swiftlite.train.console import Console

    target = root if output is None else Path(output)
    session.export(loaded, run, target, Console())
    return target / format


def download(model: str, *, hub: str = "hf", revision: str | None = None) -> Path:
    """Fetches a model into the cache and returns its folder; a model that lies on this machine is only checked.

    Args:
        model: hub id, folder, GGUF file, or package://package/file.
        hub: hf or modelscope.
        revision: branch, tag or commit.

    Raises:
        RecipeError: an unknown hub.
        ModelError: not found, no access, no network, no disk space, or files missing.
    """
    from swiftlite.models.sources import download_model

    return download_model(model, hub_name=hub, revision=revision)


def selftest(*, nproc: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Trains a tiny model in one process, then under every strategy and split, and compares what is learned. Prints a table.

    Args:
        nproc: processes; None: one for each GPU, or two on a machine without. More than there are GPUs work on the CPU.
        quiet: prints nothing.

    Returns:
        JSON-able: size (processes), device, steps, allowed {what: largest relative difference}, cases [{name, differences,
        tensors (where they are largest), ok}], failed (a line for each case that is not ok), seconds.

    Raises:
        RecipeError: a launcher has started this process.
        SwiftliteError: a case did not come to its end.
    """
    from swiftlite.train import selftest as testing
    from swiftlite.train.console import Console

    return testing.selftest(nproc, Console(quiet=quiet))


def evaluate(
    target: str | Path,
    data: str | Path,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    train_on: str | None = None,
    max_length: int | None = None,
    generate: bool = True,
    batch_size: int = 8,
    max_new_tokens: int = 256,
    examples: int = 5,
    base: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    hub: str = "hf",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Scores a run, checkpoint, adapter or model on rows, rendered and masked as in training. Tells on stderr what it loaded.

    What is not given of format, columns, train_on and max_length is taken from the recipe of the target's run, if it has one.

    Args:
        target: as `generate`.
        data: file, folder, glob or hub dataset of rows.
        format: as `data.format` of a recipe.
        columns: as `data.columns`.
        train_on: as `data.train_on`: the tokens that count for the loss, and the turn that is compared.
        max_length: tokens a row may have.
        generate: False: the loss only, no answers.
        batch_size: rows of one forward pass; the scores do not depend on it but for rounding.
        max_new_tokens: tokens of an answer at most.
        examples: answers to return.
        base, device, dtype, hub, trust_remote_code: as `generate`.

    Returns:
        JSON-able: target, data, loss (nats a trained token), perplexity, rows, tokens, trained_tokens, dropped {reason: rows};
        with `generate` also exact_match (0 to 1, None where no row has an answer to a prompt), matched, answered, and examples
        [{source, prompt, expected, answer, match}].

    Raises:
        RecipeError: a setting that is unknown or out of range.
        DataError: rows that cannot be used; names file and line.
        ModelError: the target cannot be loaded.
    """
    from swiftlite.infer import evaluate as evaluating

    # Before a model is loaded, which may take minutes.
    evaluating.check_settings(
        data, format=format, train_on=train_on, max_length=max_length, batch_size=batch_size, max_new_tokens=max_new_tokens
    )
    loaded = _open(target, base=base, device=device, dtype=dtype, hub=hub, trust_remote_code=trust_remote_code)
    return evaluating.evaluate(
        loaded,
        data,
        format=format,
        columns=columns,
        train_on=train_on,
        max_length=max_length,
        batch_size=batch_size,
        generate=generate,
        max_new_tokens=max_new_tokens,
        examples=examples,
    )


def generate(
    target: str | Path,
    prompts: str | Path | Sequence[str | Sequence[dict[str, Any]]],
    *,
    output: str | Path | None = None,
    system: str | None = None,
    raw: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    batch_size: int = 8,
    base: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    hub: str = "hf",
    trust_remote_code: bool = False,
) -> list[str]:
    """Answers prompts, in their order. Tells on stderr what it loaded.

    Args:
        target: folder of a run (its merged export, else its adapter, else its newest checkpoint), a checkpoint, an adapter, or
            a model (folder, hub id, GGUF file, package://).
        prompts: a file of rows, or a list of texts and messages. In a file, `messages` (also `conversations`, `instruction`) go
            through the chat template, and plain text under `prompt` or `text` is given as it stands. In a list, a text is a
            user's message.
        output: JSONL to write, a row of the prompt with `answer` and `finish` (stop or length) each; `-`: standard output.
        system: system prompt for messages that have none.
        raw: texts of a list are given as they stand too.
        max_new_tokens: tokens of an answer at most.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        top_p: tokens are drawn from the likeliest that make up this share; above 0, at most 1.
        seed: of drawn tokens; None: other ones each time.
        batch_size: rows of one forward pass.
        base: replaces the base model that an adapter or a checkpoint names.
        device: auto, cuda, mps or cpu. A model that does not fit the first GPU is spread over all.
        dtype: auto (fp32 on a CPU, else that of the model's files), bf16, fp16 or fp32.
        hub: hf or modelscope.
        trust_remote_code: run Python code shipped inside the model's folder.

    Returns:
        The answers without special tokens.

    Raises:
        RecipeError: a setting that is unknown or out of range.
        DataError: a prompt that cannot be used; names file and line.
        ModelError: the target cannot be loaded.
    """
    from swiftlite.infer import generate as generating
    from swiftlite.infer.prompts import as_rows, read_prompts, write_answers

    # Before a model is loaded, which may take minutes.
    generating.check_settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, batch_size=batch_size
    )
    rows = read_prompts(prompts) if isinstance(prompts, str | Path) else as_rows(prompts)
    loaded = _open(target, base=base, device=device, dtype=dtype, hub=hub, trust_remote_code=trust_remote_code)
    answers = generating.generate(
        loaded,
        rows,
        system=system,
        raw=raw,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
    )
    if output is not None:
        write_answers(None if str(output) == "-" else output, rows, answers)
    return [answer.text for answer in answers]


def chat(
    target: str | Path,
    *,
    system: str | None = None,
    raw: bool = False,
    trace: bool = False,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    base: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    hub: str = "hf",
    trust_remote_code: bool = False,
) -> None:
    """Talks on the terminal, or answers the lines of standard input, until /exit or its end.

    Args:
        raw: lines are given to the model as they stand, each by itself.
        trace: print the ids that the model is given.
        target, system, max_new_tokens, temperature, top_p, seed, base, device, dtype, hub, trust_remote_code: as `generate`.

    Raises:
        RecipeError, ModelError: as `generate`.
    """
    from swiftlite.infer import chat as chatting
    from swiftlite.infer.load import load_target

    chatting.chat(
        load_target(str(target), base=base, device=device, dtype=dtype, hub=hub, trust_remote_code=trust_remote_code),
        system=system,
        raw=raw,
        trace=trace,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )


def _open(target: str | Path, *, base: str | None, device: str, dtype: str, hub: str, trust_remote_code: bool) -> "Target":
    """Loads a target and tells on stderr what it is."""
    from swiftlite.infer.load import load_target

    loaded = load_target(str(target), base=base, device=device, dtype=dtype, hub=hub, trust_remote_code=trust_remote_code)
    print("\n".join(loaded.lines()), file=sys.stderr)
    return loaded
