"""One call trains, evaluates, saves and exports."""

from pathlib import Path

from swiftlite.data import findings
from swiftlite.data.report import table as rows_table
from swiftlite.dist import checkpoint
from swiftlite.dist.launch import ranks
from swiftlite.dist.strategies import NONE
from swiftlite.dist.world import leave, pick_device
from swiftlite.export import report
from swiftlite.export.folder import check_target
from swiftlite.export.onto import refuse
from swiftlite.export.run import check as check_export
from swiftlite.export.run import export_all
from swiftlite.export.trained import Trained
from swiftlite.models import adapters
from swiftlite.models.adapter_files import initial_state
from swiftlite.models.build import Precision, build, groups
from swiftlite.models.families.lookup import attention_for, family_for
from swiftlite.models.sources import resolve_model
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.recipe.errors import ModelError
from swiftlite.recipe.load import Loaded
from swiftlite.recipe.plugins import install
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.schema import ExportSection
from swiftlite.train import state as states
from swiftlite.train.console import Console, calm_libraries
from swiftlite.train.loop import fit
from swiftlite.train.memory import plan_memory, state_bytes
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from swiftlite.train.trained import trained_of


def train(loaded: Loaded, console: Console) -> Path:
    """Runs a recipe from data to verified exports. Returns the output folder.

    Raises:
        SwiftliteError: with its exit code.
        KeyboardInterrupt: after a signal, once a checkpoint is saved.
    """
    calm_libraries()
    if ranks().size > 1:
        loaded = resolve(loaded, ranks().size)  # the passes of a step depend on how many read rows
        console.quiet |= ranks().rank > 0
    plan = make_plan(loaded)
    plan.refuse_second_run()
    recipe = plan.recipe
    assert recipe.export.formats is not None
    refuse(recipe.export.onto, recipe.quantize is not None, plan.files)
    for name in recipe.export.formats:
        check_target(plan.output / name, recipe.export.overwrite, plan.files.folder)
    # Rows that were dropped or cut are told here too; all of them stand in data_report.json.
    lost = [rows_table({**r, "notes": []}, name) for name, r in plan.reports.items() if r["dropped"] or r["cut"]]
    for text in [*plan.lines(), *lost, *findings.one_line(plan.reports), *(f"note: {n}" for n in plan.notes)]:
        console.line(text)
    fine = False
    try:
        run = Run(plan, console)
        memory = plan_memory(plan, run.built)
        spread = groups(run.built) if run.world.size > 1 else []
        for text in [*adapters.coverage(run.root, run.built.family).lines(), *spread, *memory.lines()]:
            console.line(text)
        for note in [*run.built.notes, memory.warning()]:
            if note:
                console.line(f"note: {note}")
        check_export(run.trained(), recipe.export.formats, recipe.export, plan.output)
        weights = sum(p.numel() * p.element_size() for p in run.masters.values())
        state = state_bytes(recipe.train, run.masters.values())
        # Adapters lie in a checkpoint in both their forms, and what was split off the base in each as it is and as it started.
        forms = (4 if initial_state(run.root) else 2) if run.built.peft else 1
        run.begin(weights * forms + (0 if recipe.checkpoint.save_only_model else state))
        if run.world.is_main:
            console.log_to(plan.output / "train.log")
        with run.stop:
            try:
                fit(run)
            finally:
                run.finish()
        run.release()
        write_exports(run.trained(), recipe.export, plan.output, console)
        run.world.pulse.close()
        fine = True
    finally:
        if fine or ranks().size == 1:  # the farewell of a group waits for all, and a failed rank must be heard
            leave()
    return plan.output


def write_exports(trained: Trained, section: ExportSection, output: Path, console: Console) -> None:
    """Writes and verifies the section's formats below `output`, and prints the verdicts."""
    assert section.formats is not None
    trained.model.eval()
    config = trained.model.config
    # flex compiles for every length of the rows that are compared; varlen sums in another order than the sdpa of the exports.
    if config._attn_implementation in ("flex_attention", "varlen"):
        trained.model.set_attn_implementation(attention_for(family_for(config), config, trained.model.device.type))
    for part in export_all(trained, section.formats, section, output):
        for text in report.lines(part):
            console.line(text)


def export(loaded: Loaded, folder: Path, output: Path, console: Console) -> None:
    """Exports a run, or one of its checkpoints, in the formats of `loaded`, which is the run's own recipe.yaml but for `export`.

    Reads the base model and the checkpoint, not the data.

    Raises:
        ModelError: when there is no complete checkpoint.
    """
    saved = folder
    if checkpoint.step_of(folder) is None:
        good, _ = checkpoint.complete(folder / "checkpoints")
        if not good:
            raise ModelError("there is no complete checkpoint to export", where=folder)
        saved = good[-1]
    calm_libraries()
    install(loaded.plugins)
    # How rows were joined is no part of what was learned: an export neither compiles attention for packs nor tries isolation.
    rows_apart = loaded.recipe.data.model_copy(update={"packing": False, "padding_free": False})
    state, recipe = checkpoint.Saved(saved), loaded.recipe.model_copy(update={"data": rows_apart})
    device = pick_device(recipe.train.device)
    precision = Precision.of(recipe.train.precision, device)
    files = resolve_model(recipe.model, to_train=True)
    tokenizer = load_tokenizer(files, recipe.model)
    try:
        built, _ = build(
            files, recipe, tokenizer, precision=precision, strategy=NONE, device=device, checkpointing="none", saved=state
        )
        states.load_trainable({n: p for n, p in built.root.named_parameters() if p.requires_grad}, state)
        console.line(f"exporting {saved}")
        trained = trained_of(built, files, tokenizer, recipe, precision, state.meta["export"])
        write_exports(trained, recipe.export, output, console)
    finally:
        leave()
