"""The cases of `swiftlite selftest`: each trains the tiny model, on all ranks of this group, and is held against one process."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from swiftlite.dist.launch import ranks
from swiftlite.dist.strategies import FSDP
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import World, join, leave, pick_device
from swiftlite.recipe.load import load_recipe
from swiftlite.recipe.resolve import resolve
from swiftlite.train import tiny
from swiftlite.train.console import Console, calm_libraries
from swiftlite.train.loop import fit
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from swiftlite.train.selftest import LIMITS, RESULTS, RUNNING, SPEC, Case, Result, heading, line
from swiftlite.train.session import write_exports

# Gradients below this share of the global norm are rounding only.
FLOOR = 1e-6
# Seconds that the longest case may take, as a program of its own is compiled for a GPU.
PATIENCE = 300

Tensors = dict[str, Tensor]


@dataclass
class Outcome:
    """What a run learned: numbers of each step, the first one's gradients before clipping, weights after the last. On the CPU."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)

    def save(self, path: Path) -> None:
        kinds = {"gradients": self.gradients, "weights": self.weights}
        save_file(
            {f"{kind}:{n}": t.contiguous() for kind, ts in kinds.items() for n, t in ts.items()}, path.with_suffix(".safetensors")
        )
        path.with_suffix(".json").write_text(json.dumps([self.losses, self.norms, self.tokens]))

    @classmethod
    def load(cls, path: Path) -> "Outcome":
        found = cls(*json.loads(path.with_suffix(".json").read_text()))
        for key, tensor in load_file(path.with_suffix(".safetensors")).items():
            kind, _, name = key.partition(":")
            getattr(found, kind)[name] = tensor
        return found


class _Watched(Run):
    """A run that keeps what it learned."""

    def watch(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def expect_all(self, gradients: Sequence[Tensor]) -> None:
        super().expect_all(gradients)
        if not self.outcome.gradients:
            self.outcome.gradients = _on_cpu({n: p.grad for n, p in self.masters.items() if p.grad is not None})

    def record(self, report: Any) -> None:
        super().record(report)
        self.outcome.losses.append(report.loss)
        self.outcome.norms.append(report.grad_norm)
        self.outcome.tokens.append(report.trained_tokens)


def _on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    """Whole copies; all ranks must call."""
    return {name: whole(t).to("cpu", torch.float32, copy=True) for name, t in tensors.items()}


def work(folder: Path) -> None:
    """Runs the cases that `folder` asks for, on every rank of this launch, and leaves their results in it. Rank 0 prints them."""
    calm_libraries()
    spec = json.loads((folder / SPEC).read_text())
    cases = [Case(**case) for case in spec["cases"]]
    console = Console(quiet=spec["quiet"] or ranks().rank > 0)
    if ranks().rank == 0:  # the others wait where the ranks meet
        tiny.write(folder, rows=spec["rows"], batch=spec["batch"], steps=spec["steps"], device=spec["device"])
        with _alone():
            for name, keys in spec["references"].items():
                _note(folder, f"one process, {name}")
                train(folder, name, keys).save(folder / f"reference-{name}")
    fine = False
    world = join(pick_device(spec["device"]), FSDP, wrap=True, timeout_s=PATIENCE)
    try:
        world.barrier()
        console.line(heading())
        results = []
        for number, case in enumerate(cases):
            world.pulse.beat(number)
            if world.is_main:
                _note(folder, case.name)
            for result in compare(folder, f"{number:02}", case, world):
                results.append(result)
                console.line(line(result))
        if world.is_main:
            (folder / RESULTS).write_text(json.dumps([asdict(result) for result in results]))
        world.pulse.close()
        fine = True
    finally:
        if fine or world.size == 1:  # the farewell waits for all, and a failed rank must be heard
            leave()


def _note(folder: Path, name: str) -> None:
    (folder / RUNNING).write_text(name)


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, this process knows of no other one."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def train(folder: Path, name: str, keys: Mapping[str, Any], outcome: Outcome | None = None) -> Outcome:
    """Trains the tiny model by its recipe with other `keys`, to the exports, in the folder's `name`. Adds to `outcome`."""
    outcome = outcome or Outcome()
    given = {**keys, "output": str(folder / name)}
    loaded = load_recipe(str(folder / "recipe.yaml"), [f"{key}={json.dumps(value)}" for key, value in given.items()])
    quiet = Console(quiet=True)
    run = _Watched(make_plan(resolve(loaded, ranks().size)), quiet)
    run.watch(outcome)
    run.begin()
    try:
        fit(run)
    finally:
        run.finish()
    outcome.weights = _on_cpu(run.masters)
    run.release()
    write_exports(run.trained(), run.recipe.export, run.plan.output, quiet)
    return outcome


def compare(folder: Path, name: str, case: Case, world: World) -> Iterator[Result]:
    """Runs a case on all ranks; gives the largest differences that any of them sees."""
    expected = Outcome.load(folder / f"reference-{case.reference}")
    found, last = train(folder, name, case.keys), name
    if case.resumed:
        saved = folder / name / "checkpoints" / f"step-{case.at:06}"
        for numbers in (found.losses, found.norms, found.tokens):
            del numbers[case.at :]
        last = f"{name}-resumed"
        found = train(folder, last, {**case.resumed, "checkpoint.resume": str(saved)}, found)
    yield _everywhere(case.name, world, _differences(found, expected))
    for kind in case.resumed.get("export", []):
        seen = {}
        if world.is_main:
            seen["weights"] = _largest(_exported(folder, folder / last / kind, kind), expected.weights)
        yield _everywhere(f"  its {kind} export, in plain {'peft' if kind == 'adapter' else 'transformers'}", world, seen)


def _exported(folder: Path, export: Path, kind: str) -> Tensors:
    """Trained weights of an export by our parameter names, as other libraries read them."""
    if kind == "merged":
        return {n: p.detach().float() for n, p in AutoModelForCausalLM.from_pretrained(export).named_parameters()}
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    named = PeftModel.from_pretrained(base, export).named_parameters()
    return {n.removeprefix("base_model.model."): p.detach().float() for n, p in named if "lora_" in n}


# Largest difference, and the tensor where it is.
Seen = tuple[float, str]


def _differences(found: Outcome, expected: Outcome) -> dict[str, Seen]:
    same_rows = found.tokens == expected.tokens
    pairs = {"loss": (found.losses, expected.losses), "norm": (found.norms, expected.norms)}
    seen: dict[str, Seen] = {}
    for key, (ours, theirs) in pairs.items():
        apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)] if same_rows else [math.inf]
        seen[key] = (_worst(apart), "")
    seen["gradients"] = _largest(found.gradients, expected.gradients, FLOOR * expected.norms[0])
    seen["weights"] = _largest(found.weights, expected.weights)
    return seen


def _largest(found: Tensors, expected: Tensors, floor: float = 0.0) -> Seen:
    """The largest ||a - b|| / ||b|| of all tensors whose norm is above `floor`."""
    if odd := sorted(found.keys() ^ expected.keys()):
        return math.inf, odd[0]
    largest = (0.0, "")
    for name, b in expected.items():
        norm = float(b.double().norm())
        if norm > floor:
            largest = max(largest, (_worst([float((found[name].double() - b.double()).norm()) / norm]), name))
    return largest


def _worst(values: Sequence[float]) -> float:
    """The largest value; infinite where one is no number."""
    return max((math.inf if math.isnan(v) else v for v in values), default=math.inf)


def _everywhere(name: str, world: World, seen: Mapping[str, Seen]) -> Result:
    """The largest of what each rank has seen."""
    mine = [seen.get(key, (-1.0, ""))[0] for key in LIMITS]
    slots = world.sum(*(v if rank == world.rank else 0.0 for rank in range(world.size) for v in mine))
    values: dict[str, float | None] = {}
    for i, key in enumerate(LIMITS):
        largest = _worst(slots[i :: len(LIMITS)])
        values[key] = largest if largest >= 0 else None
    return Result(name, values, {key: tensor for key, (_, tensor) in seen.items() if tensor})
