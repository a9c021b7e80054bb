"""Answers from tiny random models: what goes in, what comes out, and that batches change nothing."""

import json
import logging
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from swiftlite.infer.generate import Decoding, complete, encode, generate
from swiftlite.infer.load import Target, load_target
from swiftlite.infer.prompts import Prompt, RawText, read_prompts, write_answers
from swiftlite.infer.stream import stream
from swiftlite.recipe.errors import DataError, RecipeError
from tests.fixtures import SMALL, tok
from tests.infer.making import chat, ids_of, save_base, write

PROMPTS = [RawText("abc"), RawText("defghij"), RawText("k"), RawText("some longer words here"), RawText("xyz")]


def other(folder: Path, kind: str) -> Path:
    """Families with another idea of positions: learned ones, none, recurrent states."""
    torch.manual_seed(0)
    ends = {name: SMALL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    configs = {
        "GPT2": (
            "GPT2LMHeadModel",
            transformers.GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ends),
        ),
        "BLOOM": ("BloomForCausalLM", transformers.BloomConfig(vocab_size=261, hidden_size=32, n_layer=2, n_head=4, **ends)),
        "MAMBA": (
            "MambaForCausalLM",
            transformers.MambaConfig(vocab_size=261, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4, **ends),
        ),
    }
    configs["RWKV"] = ("RwkvForCausalLM", transformers.RwkvConfig(vocab_size=261, hidden_size=32, num_hidden_layers=2, **ends))
    name, config = configs[kind]
    getattr(transformers, name)(config).save_pretrained(folder)
    tok().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_base(tmp_path_factory.mktemp("llama"))))


@pytest.mark.parametrize("kind", ["LLAMA", "QWEN3", "GEMMA3", "MIXTRAL", "GPT2", "BLOOM", "MAMBA", "RWKV"])
def test_a_batch_answers_as_each_alone(tmp_path: Path, kind: str):
    make = save_base if kind in ("LLAMA", "QWEN3", "GEMMA3", "MIXTRAL") else other
    target = load_target(str(make(tmp_path / "m", kind)))
    together = generate(target, PROMPTS, max_new_tokens=12, batch_size=4)
    alone = [generate(target, [prompt], max_new_tokens=12)[0] for prompt in PROMPTS]
    assert together == alone
    assert [answer.prompt_ids for answer in together] == [ids_of(str(prompt)) for prompt in PROMPTS]
    assert len({tuple(answer.token_ids) for answer in together}) > 1, "answers that are all alike prove nothing"


def test_greedy_is_argmax_with_the_whole_prompt_each_time(llama: Target):
    (answer,) = generate(llama, [RawText("abc")], max_new_tokens=10)
    ids = ids_of("abc")
    for token in answer.token_ids:
        with torch.no_grad():
            assert int(llama.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_the_base_s_own_sampling_does_not_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    plain, drawing = save_base(tmp_path / "plain"), save_base(tmp_path / "drawing")
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 9.0, "max_length": 5, "eos_token_id": 3}
    (drawing / "generation_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    one, two = load_target(str(plain)), load_target(str(drawing))
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(one, PROMPTS, max_new_tokens=8) == generate(two, PROMPTS, max_new_tokens=8)
    assert caplog.records == []


def test_an_answer_ends_at_any_stop_token(llama: Target):
    (free,) = generate(llama, [RawText("abc")], max_new_tokens=8)
    assert (free.finish, len(free.token_ids)) == ("length", 8)
    stop = free.token_ids[3]
    target = replace(llama, stop_ids=llama.stop_ids | {stop})
    answers = generate(target, [RawText("abc"), *PROMPTS[1:]], max_new_tokens=8)
    assert answers[0].token_ids == free.token_ids[:4]
    assert answers[0].finish == "stop"
    assert answers[0].text == llama.tokenizer.decode(free.token_ids[:3]), "a stop token is no text, special or not"
    assert {len(a.token_ids) for a in answers[1:]} <= set(range(9))
    assert "".join(stream(target, RawText("abc"), max_new_tokens=8)) == answers[0].text


def test_texts_messages_and_raw_texts(llama: Target):
    rendered = tok().apply_chat_template(chat("hi"), add_generation_prompt=True)["input_ids"]
    assert encode(llama, "hi") == encode(llama, chat("hi")) == rendered
    assert encode(llama, RawText("hi")) == encode(llama, "hi", raw=True) == ids_of("hi")
    system = [{"role": "system", "content": "Be brief."}]
    with_system = tok().apply_chat_template(system + chat("hi"), add_generation_prompt=True)["input_ids"]
    assert encode(llama, "hi", system="Be brief.") == with_system
    assert encode(llama, system + chat("hi"), system="Other.") == with_system, "a prompt's own system text stays"
    for wrong in ({"prompt": chat("hi"), "raw": True}, {"prompt": RawText("hi"), "system": "Be brief."}, {"prompt": RawText("")}):
        with pytest.raises(DataError):
            encode(llama, **wrong)
    with pytest.raises(DataError, match="unknown role"):
        encode(llama, [{"role": "robot", "content": "hi"}])


def test_the_model_s_length_is_kept(tmp_path: Path):
    """Learned positions end; a batch may not cut a short prompt's answer for the sake of a long one."""
    target = load_target(str(other(tmp_path / "m", "GPT2")))
    assert target.positions == 64
    prompts = [RawText("a" * 60), RawText("b" * 3), RawText("c" * 50)]
    answers = generate(target, prompts, max_new_tokens=20, batch_size=3)
    assert [len(a.token_ids) for a in answers] == [4, 20, 14]
    assert answers == [generate(target, [p], max_new_tokens=20)[0] for p in prompts]
    assert len("".join(stream(target, prompts[0], max_new_tokens=20))) > 0
    with pytest.raises(DataError, match="64"):
        generate(target, [RawText("a" * 64)])


def test_drawn_answers_repeat_with_a_seed(llama: Target):
    state = torch.get_rng_state()
    drawn = [generate(llama, PROMPTS, max_new_tokens=8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    likeliest = generate(llama, PROMPTS, max_new_tokens=8, temperature=1.0, top_p=1e-6, seed=1)
    assert likeliest == generate(llama, PROMPTS, max_new_tokens=8)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_new_tokens": 0}])
def test_settings_out_of_range(llama: Target, wrong: dict):
    with pytest.raises(RecipeError) as caught:
        generate(llama, ["hi"], **wrong)
    assert caught.value.where == next(iter(wrong))


def test_no_prompts_no_answers(llama: Target):
    assert generate(llama, []) == []


@pytest.mark.parametrize("seed", range(4))
def test_streamed_pieces_join_to_the_answer(llama: Target, seed: int):
    """Drawn bytes at a high temperature: cut characters, special tokens, nothing printable."""
    settings = {"max_new_tokens": 40, "temperature": 3.0, "seed": seed}
    (answer,) = generate(llama, [RawText("abc")], **settings)
    pieces = list(stream(llama, RawText("abc"), **settings))
    assert "".join(pieces) == answer.text
    assert all(pieces)


def test_whole_characters_are_streamed(llama: Target, monkeypatch: pytest.MonkeyPatch):
    said = ids_of("né 日本")

    def say(input_ids: torch.Tensor, streamer: object, **kwargs: object) -> torch.Tensor:
        streamer.put(input_ids)
        for token in [*said, 3]:
            streamer.put(torch.tensor([token]))
        return torch.cat([input_ids, torch.tensor([[*said, 3]])], 1)

    monkeypatch.setattr(llama.model, "generate", say)
    assert list(stream(llama, "hi")) == ["n", "é", " ", "日", "本"]


def test_a_stream_left_early_stops_the_model(llama: Target, monkeypatch: pytest.MonkeyPatch):
    steps, forward = [], llama.model.forward

    def counted(*args: object, **kwargs: object) -> object:
        steps.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama.model, "forward", counted)
    pieces = stream(llama, RawText("abc"), max_new_tokens=200)
    next(pieces)
    pieces.close()
    done = len(steps)
    assert done < 200
    assert list(stream(llama, RawText("abc"), max_new_tokens=2)) is not None
    assert len(steps) == done + 2, "the first one went on in the background"


def test_a_fault_in_the_model_reaches_the_reader(llama: Target, monkeypatch: pytest.MonkeyPatch):
    def broken(**kwargs: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llama.model, "generate", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(stream(llama, "hi"))


def test_prompts_of_a_file(tmp_path: Path, llama: Target):
    system = {"role": "system", "content": "S"}
    rows = [
        {"messages": chat("hi", "yo"), "id": 7},
        {"messages": [system, *chat("a", "b", "c")]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}], "system": "S"},
        {"instruction": "do", "input": "it"},
        {"instruction": "do", "output": "done"},
        {"prompt": chat("hi"), "completion": [{"role": "assistant", "content": "yo"}]},
        {"prompt": "Once", "completion": " upon"},
        {"text": "Once"},
    ]
    read = read_prompts(write(tmp_path / "p.jsonl", rows))
    assert [p.prompt for p in read] == [
        chat("hi"),
        [system, *chat("a", "b", "c")],
        [system, *chat("q")],
        chat("do\nit"),
        chat("do"),
        chat("hi"),
        "Once",
        "Once",
    ]
    assert [p.expected for p in read] == ["yo", None, "r", None, "done", "yo", " upon", None]
    assert [isinstance(p.prompt, RawText) for p in read] == [False] * 6 + [True] * 2
    assert read[3].source == f"{tmp_path / 'p.jsonl'}:4"
    answers = generate(llama, read, max_new_tokens=3)
    assert answers[6].prompt_ids == ids_of("Once")
    write_answers(tmp_path / "deep" / "out.jsonl", read, answers)
    out = [json.loads(line) for line in (tmp_path / "deep" / "out.jsonl").read_text().splitlines()]
    assert [{k: row[k] for k in given} for row, given in zip(out, rows, strict=True)] == rows
    assert [(row["answer"], row["finish"]) for row in out] == [(a.text, a.finish) for a in answers]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out.jsonl"]


def test_answers_without_a_file_go_to_standard_output(capsys: pytest.CaptureFixture, llama: Target):
    row = Prompt(RawText("abc"), row={"text": "abc"})
    write_answers(None, [row], generate(llama, [row], max_new_tokens=2))
    assert json.loads(capsys.readouterr().out)["text"] == "abc"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "not JSON"),
        ('{"question": "hi"}', "none of messages"),
        ('{"messages": []}', "empty list"),
        ('{"messages": [{"role": "assistant", "content": "yo"}]}', "nothing in front"),
        ('{"prompt": 1.5}', "not text"),
        ('{"prompt": "a", "system": "S"}', "takes no system prompt"),
        ('{"prompt": "a", "images": ["x.png"]}', "images"),
    ],
)
def test_a_bad_prompt_is_named_by_line(tmp_path: Path, line: str, said: str):
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=said) as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"


def test_no_prompt_file(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, llama: Target):
    row, file = Prompt(RawText("abc"), row={"text": "abc"}), tmp_path / "out.jsonl"
    file.write_text("old")
    with pytest.raises(ValueError, match="shorter"):
        write_answers(file, [row, row], complete(llama, [ids_of("abc")], Decoding(2)))
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]
