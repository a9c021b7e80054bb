"""Trials of kind N, inference after training, and those of kind F that happen on the way: adapters that do not line up."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.data.formats import Conversation
from swiftlite.infer.chat import chat as talk
from swiftlite.infer.evaluate import evaluate
from swiftlite.infer.generate import encode, generate
from swiftlite.infer.load import load_target
from swiftlite.infer.prompts import RawText, read_prompts
from swiftlite.infer.stream import stream
from swiftlite.recipe.errors import ModelError
from tests.fixtures import CHATML, IM_END, LLAMA3, model, tok
from tests.infer.making import chat, ids_of, logits, save_adapter, save_base, save_checkpoint, save_taught, write


def test_N01_the_template_s_end_token_stops_a_base_that_knows_only_eos(tmp_path: Path):
    always_0 = model("LLAMA", vocab=261)
    torch.nn.init.zeros_(always_0.model.norm.weight)
    always_0.save_pretrained(tmp_path / "m")
    tok(CHATML, eos="</s>").save_pretrained(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"] == 3
    target = load_target(str(tmp_path / "m"))
    assert target.stop_ids == {IM_END, 3}
    (answer,) = generate(target, ["hi"], max_new_tokens=8)
    assert (answer.token_ids, answer.text, answer.finish) == ([IM_END], "", "stop")
    assert list(stream(target, "hi", max_new_tokens=8)) == []


@pytest.mark.parametrize("base_template", [None, LLAMA3])
def test_N03_every_folder_of_a_run_is_asked_by_the_template_of_training(tmp_path: Path, base_template: str | None):
    base, run = save_base(tmp_path / "base", template=base_template), tmp_path / "run"
    peft = save_adapter(run / "adapter", base, template=CHATML)
    (run / "recipe.yaml").write_text(f"model: {base}\ndata: {{train: x.jsonl, chat_template: {json.dumps(CHATML)}}}\n")
    checkpoint = save_checkpoint(run, 1, peft.base_model.model, run / "adapter")
    peft.merge_and_unload().save_pretrained(run / "merged")
    tok(CHATML).save_pretrained(run / "merged")
    expected = tok(CHATML).apply_chat_template(chat("hi"), add_generation_prompt=True)["input_ids"]
    for folder in (run, run / "adapter", run / "merged", checkpoint, checkpoint / "adapter"):
        assert encode(load_target(str(folder)), "hi") == expected, folder


def test_N04_batch_answers_are_single_answers(tmp_path: Path):
    target = load_target(str(save_base(tmp_path / "m", "LLAMA")))
    prompts = [RawText("abc"), RawText("defghij")]
    both = generate(target, prompts, max_new_tokens=6)
    single = [generate(target, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    rows = read_prompts(write(tmp_path / "p.jsonl", [{"prompt": "abc"}, {"text": "defghij"}]))
    assert both == single == generate(target, rows, max_new_tokens=6)
    assert both[0].token_ids == [25, 160, 157, 235, 20, 117]
    for answer, prompt in zip(both, prompts, strict=True):
        assert answer.prompt_ids == ids_of(prompt)
        assert len(answer.token_ids) == 6
        assert answer.text == tok().decode(answer.token_ids, skip_special_tokens=True)


def test_N05_the_saved_template_is_used_and_raw_is_asked_for(tmp_path: Path):
    target = load_target(str(save_taught(tmp_path / "m")))
    row = target.renderer.sample(Conversation("x:1", "chat", chat("hi", "yo")))
    before = row.input_ids[: next(i for i, label in enumerate(row.labels) if label != -100)]

    def ask(**options: bool) -> tuple[list[int], str]:
        said, lines = [], iter(["hi", "/exit"])
        talk(target, max_new_tokens=8, trace=True, read=lambda _: next(lines), write=said.append, **options)
        ids, answer = "".join(said).split("\n", 1)
        return json.loads(ids.removeprefix("prompt ids: ")), answer

    assert ask() == (before, "yo\n")
    assert ask(raw=True)[0] == tok()("hi")["input_ids"]
    scores = evaluate(target, write(tmp_path / "e.jsonl", [{"messages": chat("hi", "yo")}]))
    assert scores["exact_match"] == 1.0
    assert scores["examples"][0]["prompt"] == tok().decode(before)


def test_F04_an_adapter_whose_tensors_do_not_line_up_is_refused(tmp_path: Path):
    base = save_base(tmp_path / "base")
    save_adapter(tmp_path / "good", base)
    good = load_target(str(tmp_path / "good"))
    assert not torch.allclose(logits(good.model), logits(load_target(str(base)).model), atol=1e-3)

    tensors = load_file(tmp_path / "good" / "adapter_model.safetensors")
    names = sorted(tensors)
    narrow = next(n for n in names if n.endswith("lora_A.weight"))
    bad = {
        "renamed": {n.replace("model.layers", "model.language_model.layers"): t for n, t in tensors.items()},
        "halved": {n: tensors[n] for n in names[::2]},
        "rank": tensors | {narrow: torch.zeros(8, tensors[narrow].shape[1])},
        "more": tensors | {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": tensors[narrow].clone()},
    }
    for name, changed in bad.items():
        folder = shutil.copytree(tmp_path / "good", tmp_path / name)
        save_file(changed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError) as caught:
            load_target(str(folder))
        assert "adapter" in str(caught.value)
        assert any(key in str(caught.value) for key in [*tensors, *changed]), f"{name}: no key is named in {caught.value}"


def test_F08_keys_of_a_newer_peft(tmp_path: Path):
    save_adapter(tmp_path / "a", save_base(tmp_path / "base"))
    file = tmp_path / "a" / "adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"new_thing": None}))
    notes = load_target(str(tmp_path / "a")).notes
    assert sum("new_thing" in note for note in notes) == 1
    file.write_text(json.dumps(values | {"new_thing": {"on": True}}))
    with pytest.raises(ModelError, match="new_thing"):
        load_target(str(tmp_path / "a"))


@pytest.mark.parametrize("offline", ["1", None])
def test_K01_a_local_base_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network_guard: list[str], offline: str | None
):
    """The guard of tests/conftest.py fails the test for any look-up."""
    base = save_base(tmp_path / "base")
    save_adapter(tmp_path / "a", base, names="example-org/not-there")
    if offline is None:
        monkeypatch.delitem(os.environ, "HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    target = load_target(str(tmp_path / "a"), base=str(base))
    generate(target, ["hi"], max_new_tokens=2)
    assert network_guard == []
