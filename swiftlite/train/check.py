"""`swiftlite check`: everything that can be known before step 1, without weights; the model is built on meta."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from swiftlite.data import findings
from swiftlite.data.loader import Loader
from swiftlite.data.report import dump as dump_rows
from swiftlite.data.report import preview
from swiftlite.data.report import table as rows_table
from swiftlite.data.streaming import Stream
from swiftlite.dist.launch import processes
from swiftlite.export.folder import check_target
from swiftlite.models.adapters import coverage
from swiftlite.models.build import groups, skeleton
from swiftlite.recipe import tables
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.show import table
from swiftlite.train.console import Console, calm_libraries
from swiftlite.train.memory import MemoryPlan, plan_memory
from swiftlite.train.plan import Plan, make_plan
from swiftlite.train.trained import export_facts, trained_of


def check(loaded: Loaded, console: Console, dump: str | Path | None = None, nproc: int | None = None) -> dict[str, Any]:
    """Prints what a run will be made of, and returns it for machines; see `swiftlite.api.check`.

    Raises:
        RecipeError, DataError, ModelError: with what to change.
    """
    calm_libraries()
    size = nproc or processes(None, loaded.recipe.train.device, loaded.recipe.strategy.name)
    plan = make_plan(resolve(loaded, size) if size > 1 else loaded, need_weights=False, world_size=size)
    built = skeleton(plan.files, plan.recipe, plan.tokenizer, plan.precision, plan.device)
    settled = plan.settled(built.root.config)
    trained = trained_of(built, plan.files, plan.tokenizer, plan.recipe, plan.precision, export_facts(plan))
    for name in plan.recipe.export.formats or []:
        tables.load(tables.EXPORTERS, name).check(trained, plan.recipe.export)
    covered, memory = coverage(built.root, built.family), plan_memory(plan, built)
    notes = plan.notes + built.notes + _warnings(plan, memory)
    if settled:
        console.line("\n".join(["left to this machine and model", *table(settled), ""]))
    for name, report in plan.reports.items():
        # The notes are among those at the end.
        console.line("\n".join([rows_table({**report, "notes": []}, name), *findings.lines(report), ""]))
    if isinstance(plan.loader, Stream):
        console.line(f"train rows are {plan.loader.about}\n")
    colour = console.rich.is_terminal
    console.line(f"the first rows as the model gets them, trained tokens {'in green' if colour else 'between {+ and +}'}")
    console.line(preview(plan.train.samples, plan.tokenizer, colour=colour).rstrip("\n") + "\n")
    spread = groups(built) if size > 1 else []
    for text in [*covered.lines(), *plan.step_lines(), *spread, *memory.lines(), *(f"note: {n}" for n in notes)]:
        console.line(text)
    if dump is not None:
        # Of a stream the first rows, not packed.
        samples, loader = plan.train.samples, plan.loader
        packed = isinstance(loader, Loader) and loader.capacity is not None
        units = loader.units(0) if packed else [[i] for i in range(len(samples))]
        dump_rows(([samples[i] for i in unit] for unit in units), dump)
        console.line(f"dumped    {len(units):,} {'packs' if packed else 'rows'} to {dump}")
    memory.refuse()
    return {
        "rows": None if isinstance(plan.loader, Stream) else len(plan.train.samples),
        "steps": plan.schedule.total,
        "steps_per_epoch": plan.schedule.per_epoch,
        "warmup_steps": plan.schedule.rate.warmup,
        "learning_rate": plan.schedule.rate.peak,
        "settled": {key: {"value": value, "origin": origin} for key, value, origin in settled},
        "reports": plan.reports,
        "coverage": asdict(covered),
        "memory": memory.as_data(),
        "notes": notes,
    }


def _warnings(plan: Plan, memory: MemoryPlan) -> list[str]:
    """What would stop or hamper `swiftlite train` as things are now."""
    found = [memory.warning()]
    try:
        plan.refuse_second_run()
        for name in plan.recipe.export.formats or []:
            check_target(plan.output / name, plan.recipe.export.overwrite, plan.files.folder)
    except RecipeError as error:
        found.append(f"training would stop here: {error}")
    return [text for text in found if text]
