"""The verbs as a user starts them, one process each, on a tiny model. Each imports torch, so most tests are slow ones."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swiftlite.dist import checkpoint
from tests.training import CHAT, LORA, recipe, write_rows


def swiftlite(*arguments: object, stdin: str = "", cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    command = [sys.executable, "-m", "swiftlite", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def told(answer: tuple[int, str, str]) -> tuple[int, str]:
    """Exit code and the one message of a user's mistake."""
    code, out, err = answer
    assert "Traceback" not in out + err
    assert [line.startswith("error: ") for line in err.splitlines() if " on base " not in line] == [True], err
    return code, err.splitlines()[-1]


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Path:
    """A folder with recipe.yaml, its model and rows, and eval.jsonl."""
    folder = tmp_path_factory.mktemp("story")
    rows = write_rows(folder / "eval.jsonl", CHAT)
    recipe(
        folder,
        lora=LORA,
        data={"eval": str(rows)},
        train={"max_steps": 4},
        checkpoint={"save_strategy": "steps", "save_steps": 2},
        export=["adapter"],
    )
    return folder


@pytest.fixture(scope="module")
def run(story) -> Path:
    code, out, err = swiftlite("train", "recipe.yaml", "output=run", cwd=story)
    assert (code, err) == (0, "")
    assert "step      4/4  loss " in out
    assert "verified" in out
    return story / "run"


def test_a_wrong_recipe_exits_2(story):
    code, message = told(swiftlite("train", "recipe.yaml", "lora.rnak=3", cwd=story))
    assert code == 2
    assert "Did you mean 'lora.rank'?" in message
    code, _, err = swiftlite("check", "recipe.yaml", "lora.rank=fast", "--debug", cwd=story)
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_a_folder_without_a_run_exits_4(tmp_path):
    code, message = told(swiftlite("export", tmp_path, "--format", "merged"))
    assert code == 4
    assert str(tmp_path) in message
    code, _, err = swiftlite("export", tmp_path, "--format", "merged", "--debug")
    assert (code, "Traceback" in err) == (4, True)


def test_wrong_data_exits_3(story):
    (story / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]\n')
    code, message = told(swiftlite("check", "recipe.yaml", "data.train=bad.jsonl", cwd=story))
    assert code == 3
    assert "bad.jsonl:1" in message


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_model_that_is_not_there_exits_4(story, verb):
    code, message = told(swiftlite(verb, "recipe.yaml", "model=./lama", "output=none", cwd=story))
    assert code == 4
    assert "Did you mean './llama'?" in message
    assert not (story / "none").exists()


@pytest.mark.slow
def test_check(story, tmp_path):
    code, out, err = swiftlite("check", "recipe.yaml", "output=new", "--dump", tmp_path / "rows.jsonl", cwd=story)
    assert (code, err) == (0, "")
    for said in ("lora.rank: 4 ", "(recipe.yaml:", "(command line)", "train.weight_decay: 0.0", "{+yo<|im_end|>+}", "memory    "):
        assert said in out
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line.keys() for line in lines] == [{"input_ids", "labels", "position_ids", "source"}] * len(CHAT)
    assert not (story / "new").exists()
    code, out, err = swiftlite("check", "recipe.yaml", "--json", cwd=story)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["recipe"]["lora"]["rank"], found["plan"]["steps"]) == (4, 4)
    assert found["plan"]["settled"]["strategy.name"] == {"value": "none", "origin": "derived: 1 process"}


@pytest.mark.slow
def test_from_a_run_to_answers(run, story):
    assert told(swiftlite("train", "recipe.yaml", "output=run", cwd=story))[0] == 2, "the folder holds a run already"
    code, out, err = swiftlite(
        "export", "run/checkpoints/step-000002", "--format", "merged", "--dtype", "bf16", "--output", "else", cwd=story
    )
    assert (code, err) == (0, "")
    assert "verified" in out
    assert json.loads((story / "else" / "merged" / "config.json").read_text())["dtype"] == "bfloat16"

    write_rows(story / "p.jsonl", [{"messages": CHAT[0]["messages"]}, {"prompt": "abc"}])
    code, out, err = swiftlite("generate", "run", "--prompts", "p.jsonl", "--max-new-tokens", 5, cwd=story)
    assert code == 0
    assert err == f"adapter run/adapter on base {story}/llama (LlamaForCausalLM, float32, cpu)\n"
    answers = [json.loads(line)["answer"] for line in out.splitlines()]
    assert len(answers) == 2
    code, out, _ = swiftlite(
        "generate", "run", "--prompts", "p.jsonl", "--max-new-tokens", 5, "--output", "a.jsonl", "--base", "llama", cwd=story
    )
    assert (code, out) == (0, "")
    assert [json.loads(line)["answer"] for line in (story / "a.jsonl").read_text().splitlines()] == answers

    code, out, err = swiftlite("chat", "run", "--max-new-tokens", 5, "--trace", stdin="hi\n", cwd=story)
    assert code == 0
    assert out.startswith("prompt ids: [")
    assert out.endswith(f"\n{answers[0]}\n")
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_eval(run, story):
    code, out, err = swiftlite("eval", "run", "--data", "eval.jsonl", "--json", "--max-new-tokens", 5, cwd=story)
    assert code == 0
    scores = json.loads(out)
    assert (scores["rows"], scores["answered"]) == (4, 4)
    assert len(err.splitlines()) == 1
    code, out, _ = swiftlite("eval", "run", "--data", "eval.jsonl", "--no-generate", "--train-on", "all", cwd=story)
    assert code == 0
    assert out.startswith("loss ")
    assert "exact match" not in out
    assert told(swiftlite("eval", "run", "--data", "gone.jsonl", cwd=story))[0] == 3
    assert told(swiftlite("generate", "runn", "--prompts", "p.jsonl", cwd=story))[0] in (3, 4)
    assert told(swiftlite("eval", "./runn", "--data", "eval.jsonl", cwd=story))[0] == 4


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_130(story):
    command = [sys.executable, "-m", "swiftlite", "train", "recipe.yaml", "output=stopped", "train.max_steps=100000"]
    with subprocess.Popen(command, cwd=story, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "interrupted\n")
    (newest,) = checkpoint.complete(story / "stopped" / "checkpoints")[0][-1:]
    assert f"saved     stopped/checkpoints/{newest.name}" in out
