"""Low-bit training on a real model: the quickstart's task with a base in bf16, in NF4 and in float8; rows and seed are the same.

    python benchmarks/lowbit.py runs/lowbit --picture docs/lowbit.svg      # pip install matplotlib, for the picture alone
    python benchmarks/lowbit.py runs/one-epoch --cases bf16,nf4 --seeds 1,2,3 train.num_train_epochs=1
    python benchmarks/lowbit.py runs/more-rows --cases bf16,nf4 --seeds 1,2,3 --train-rows 1100 train.num_train_epochs=1

SmolLM2-135M-Instruct learns to answer in JSON. Each case is a run of its own, of recipes/quickstart.yaml for three epochs in bf16
and with the keys given; one that is there already is not trained again. Exact match is of greedy answers to 192 rows about other
people, things and times than the training rows: the 32 of the quickstart and 160 more by its generator, since one of 32 is 0.03
by itself. It is asked of the merged export, and of the adapter on the weights of the model's files (`export.onto: original`).
Exit code 1: the merged export of a packed base, as `export.onto: auto` chose it, is more than 0.03 behind that of the first case,
in the mean of all seeds: another seed alone moves a result by about as much.
"""

import argparse
import itertools
import json
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite import api
from swiftlite.train.session import calm_libraries

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/quickstart"
CASES = {
    "bf16": [],
    "nf4": ["quantize.method=nf4"],
    "nf4-double": ["quantize.method=nf4", "quantize.double_quant=true"],
    "nf4-qera": ["quantize.method=nf4", "lora.init=qera"],
    "fp8": ["quantize.method=fp8"],
}
TITLES = {"bf16": "bf16", "nf4": "NF4", "nf4-double": "NF4, double", "nf4-qera": "NF4, lora.init: qera", "fp8": "float8"}
COLOURS = {"bf16": "#222222", "nf4": "#c1440e", "nf4-double": "#e8a33d", "nf4-qera": "#3a8f4d", "fp8": "#1f77b4"}
KEYS = ["train.precision=bf16", "train.num_train_epochs=3", "log.logging_steps=1", "export.formats=[adapter,merged]"]
# One misspelt name is wrong in all its rows: 16 people of the quickstart's held-back rows would be too few to tell by.
PEOPLE = (
    *("Adele", "Bruno", "Camila", "Dario", "Edith", "Fergus", "Gloria", "Hakim", "Iris", "Jasper", "Keiko", "Liam", "Mabel"),
    *("Nabil", "Opal", "Petra", "Quentin", "Roberta", "Simon", "Thelma", "Ulrich", "Vera", "Walter", "Ximena", "Yara", "Zeke"),
    *("Alfred", "Bella", "Cyrus", "Daphne", "Eduardo", "Fiona", "Gavin", "Harriet", "Igor", "Joanna", "Karim", "Lydia"),
    *("Mr. Abbott", "Mrs. Novak", "Ms. Reyes", "Dr. Quinn", "Coach Hill", "Aunt Sue", "Uncle Ben", "Cousin Amy", "Mr. Wu"),
    *("Sergei", "Tanya", "Victor", "Wanda", "Yolanda", "Zach", "Brigitte", "Chester", "Delia", "Emil", "Gwen", "Hector"),
)
OWN, ROWS, SEED = 32, 192, 11  # rows of the quickstart, of all that are held back
ALLOWED = 0.03


def answer(row: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = json.loads(row["messages"][-1]["content"])
    return found


def held_back(file: Path) -> Path:
    """The quickstart's held-back rows, and more about its held-back things, other people, at times that no other row names."""
    made = runpy.run_path(str(QUICKSTART / "make_data.py"))
    own = [[json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()] for name in ("train.jsonl", "eval.jsonl")]
    used = {answer(row)["when"] for rows in own for row in rows}
    rng = random.Random(SEED)
    moments = made["Pack"](rng, itertools.product(made["DAYS"], range(7, 22), (0, 15, 30, 45)))
    writer = made["Writer"](rng, PEOPLE, made["EVAL_THINGS"])
    more = [row for row in made["write"](writer, moments, len(moments.cards)) if answer(row)["when"] not in used]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in (own[1] + more)[:ROWS]))
    return file


def longer(file: Path, count: int) -> Path:
    """`count` training rows: those of the quickstart, and more by its generator at times that no held-back row names."""
    made = runpy.run_path(str(QUICKSTART / "make_data.py"))
    rng = random.Random(SEED)
    moments = made["Pack"](rng, itertools.product(made["DAYS"], range(7, 22), (5, 10, 20, 25, 35, 40, 50, 55)))
    writer = made["Writer"](rng, made["TRAIN_PEOPLE"], made["TRAIN_THINGS"])
    own = (QUICKSTART / "train.jsonl").read_text().splitlines()
    more = [json.dumps(row) for row in made["write"](writer, moments, count - len(own))]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*own, *more]) + "\n")
    return file.resolve()


def train(folder: Path, keys: list[str]) -> float:
    """Trains and exports in a process of its own, from the repository's root; seconds."""
    began = time.monotonic()
    last = {key.partition("=")[0]: key for key in [*KEYS, *keys]}
    command = [sys.executable, "-m", "swiftlite", "train", "quickstart", f"output={folder.resolve()}", *last.values()]
    subprocess.run(command, cwd=ROOT, check=True)
    return time.monotonic() - began


def examine(folder: Path, rows: Path) -> dict[str, Any]:
    """What the exports answer, and what the run and the merge report say."""
    settings: dict[str, Any] = {"batch_size": 64, "max_new_tokens": 64, "dtype": "bf16", "examples": ROWS}
    merged, adapter = (api.evaluate(folder / name, rows, **settings) for name in ("merged", "adapter"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((folder / "export_report.json").read_text())["merged"]
    return {
        "exact_match": merged["exact_match"],
        "exact_match_quickstart": sum(row["match"] for row in merged["examples"][:OWN]) / OWN,
        "missed": [[row["expected"], row["answer"]] for row in merged["examples"] if not row["match"]],
        "loss": merged["loss"],
        "exact_match_adapter_on_files": adapter["exact_match"],
        "losses": [line["loss"] for line in lines if "loss" in line],
        "eval_losses": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "gaps": report.get("gaps"),
        "onto": report.get("onto"),
        "updates": report["updates"],
        "versions": report["versions"],
    }


def run(case: str, folder: Path, rows: Path, keys: list[str]) -> dict[str, Any]:
    """The results of a case: those that its folder holds, if they are of the same keys, else new ones."""
    kept, mine = folder / "lowbit.json", [*CASES[case], *keys]
    if kept.exists() and (found := json.loads(kept.read_text()))["keys"] == mine:
        return dict(found)
    shutil.rmtree(folder, ignore_errors=True)
    found = {"case": case, "keys": mine, "seconds": train(folder, mine), **examine(folder, rows)}
    kept.write_text(json.dumps(found, indent=1))
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. Gaps: of the adapter's logits on the dequantised and on the files' weights, to the trained model."""
    lines = [
        "| base | eval loss before, after | exact match, merged | of the quickstart's rows | adapter on the files' weights "
        "| gap dequantised (relative, KL, same likeliest token) | gap original | merged onto |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        gaps = [(r["gaps"] or {}).get(kind) for kind in ("dequantised", "original")]
        said = [f"{g['relative']:.2g}, {g['kl']:.2g}, {g['top1_agreement']:.1%}" if g else "" for g in gaps]
        loss = f"{r['eval_losses'][0]:.2f}, {r['eval_losses'][-1]:.4f}"
        exact = " | ".join(f"{r[f'exact_match{kind}']:.3f}" for kind in ("", "_quickstart", "_adapter_on_files"))
        lines.append(f"| {TITLES[r['case']]} | {loss} | {exact} | {said[0]} | {said[1]} | {(r['onto'] or {}).get('base', '')} |")
    return "\n".join(lines)


def behind(results: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """How far the merged exports of a case are behind those of another in the mean of the seeds, and a sentence about it."""
    both = []
    for way in ("exact_match", "exact_match_adapter_on_files"):
        gaps = [theirs[way] - mine[way] for mine, theirs in zip(results, plain, strict=True)]
        error = f" (standard error {statistics.stdev(gaps) / len(gaps) ** 0.5:.3f})" if len(gaps) > 1 else ""
        both.append((statistics.fmean(gaps), error))
    (merged, error), (on_files, other) = both
    names, seeds = [TITLES[of[0]["case"]] for of in (results, plain)], f"{len(results)} seed{'s' * (len(results) > 1)}"
    said = (
        f"{names[0]} is {merged:.3f}{error} behind {names[1]} merged, and {on_files:.3f}{other} on the files' weights; {seeds}."
    )
    return merged, said


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """The loss of every step, and below it how far the packed bases are from the one that is not."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "lowbit", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5.6), sharex=True, gridspec_kw={"height_ratios": [2, 1]}, layout="constrained"
    )
    plain = next((r["losses"] for r in results if r["case"] == "bf16"), None)
    for r in results:
        steps, style = range(1, len(r["losses"]) + 1), {"color": COLOURS[r["case"]], "linewidth": 1.4}
        exact = f"{r['exact_match']:.2f} merged, {r['exact_match_adapter_on_files']:.2f} on the files' weights"
        above.plot(steps, r["losses"], label=f"{TITLES[r['case']]}: exact match {exact}", **style)
        if plain and r["case"] != "bf16":
            below.plot(steps, [a - b for a, b in zip(r["losses"], plain, strict=True)], **style)
    above.set(yscale="log", ylabel="loss of the step", title="SmolLM2-135M-Instruct, the quickstart's task, LoRA r=16")
    above.legend(frameon=False)
    below.axhline(0, color=COLOURS["bf16"], linewidth=1.4)
    below.set(xlabel="optimizer step", ylabel="minus that of bf16")
    below.set_yscale("symlog", linthresh=0.03)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    below.set_yticks([-0.1, -0.03, 0, 0.03, 0.1, 0.3], labels=["-0.1", "-0.03", "0", "0.03", "0.1", "0.3"])
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--cases", type=lambda names: names.split(","), default=list(CASES), help=",".join(CASES))
    parser.add_argument("--seeds", type=lambda seeds: seeds.split(","), default=[], help="a run of each case with each: 1,2,3")
    parser.add_argument("--train-rows", type=int, help="more than the quickstart has")
    parser.add_argument("--picture", type=Path, help="the loss curves (of the first seed), .svg or .png")
    given = parser.parse_intermixed_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    calm_libraries()
    rows = held_back(given.folder / "held-back.jsonl")
    if given.train_rows:
        given.keys.append(f"data.train={longer(given.folder / 'train.jsonl', given.train_rows)}")
    runs = [(given.folder / f"seed-{seed}", [*given.keys, f"seed={seed}"]) for seed in given.seeds] or [
        (given.folder, given.keys)
    ]
    found = [[run(case, folder / case, rows, keys) for case in given.cases] for folder, keys in runs]
    for results in found:
        print(table(results))
    if given.picture:
        draw(found[0], given.picture)
    plain, *others = zip(*found, strict=True)
    gaps = [behind(results, plain) for results in others]
    print("\n".join(said for _, said in gaps))
    return 1 if any(gap > ALLOWED for gap, _ in gaps) else 0


if __name__ == "__main__":
    sys.exit(main())
