"""The tokenizer: loaded as the model ships it, changed only where asked, written so that other readers see the same ids."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from swiftlite.models.files import ModelFiles
from swiftlite.models.tokenizer import (
    add_tokens,
    added_token_ids,
    init_new_rows,
    load_tokenizer,
    new_rows,
    pad_id,
    save_tokenizer,
    set_chat_template,
)
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.schema import ModelSection
from tests.fixtures import CHATML, CHATML_GEN, tok

PROBE = "Hello 123 你好 \n\n\t x"


def base(folder, tokenizer=None):
    """A model folder with a tokenizer in it."""
    (tokenizer or tok()).save_pretrained(folder)
    LlamaConfig(vocab_size=272).save_pretrained(folder)
    return ModelFiles(folder, str(folder))


def load(files, *tokens):
    return load_tokenizer(files, ModelSection(name=str(files.folder), add_tokens=list(tokens)))


def edit(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def files(tmp_path):
    return base(tmp_path / "base")


# -- loading --------------------------------------------------------------------------------------------------------------


def test_loads_as_shipped(files, network_guard):
    tokenizer = load(files)
    assert tokenizer.is_fast and len(tokenizer) == 261
    assert tokenizer(PROBE).input_ids == tok()(PROBE).input_ids
    assert (tokenizer.pad_token_id, tokenizer.chat_template) == (1, CHATML)
    assert network_guard == []


def test_no_tokenizer_files(tmp_path):
    files = base(tmp_path / "base")
    for path in files.folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load(files)


def test_broken_tokenizer_file(files):
    (files.folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load(files)


def test_code_of_a_tokenizer_is_not_run_where_its_json_says_all(files, tmp_path):
    mark = tmp_path / "PWNED"
    (files.folder / "tokenization_own.py").write_text(f"open({str(mark)!r}, 'w')")
    edit(
        files.folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]}
    )
    edit(files.folder / "config.json", model_type="own")
    assert load(files)(PROBE).input_ids == tok()(PROBE).input_ids
    assert not mark.exists()


# -- padding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pad": None}, "<|pad|>"),  # kept by the publisher for padding, though its config does not say so
        ({"pad": "<s>"}, "<s>"),  # said: left alone
    ],
)
def test_padding_takes_an_existing_token(tmp_path, given, expected):
    tokenizer = load(base(tmp_path / "base", tok(**given)))
    assert (tokenizer.pad_token, len(tokenizer)) == (expected, 261)


def test_padding_falls_back_to_the_end_token(tmp_path):
    tokenizer = tok(pad=None)
    whole = json.loads(tokenizer.backend_tokenizer.to_str().replace("<|pad|>", "<|other|>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)), eos_token="</s>")
    loaded = load(base(tmp_path / "base", tokenizer))
    assert (loaded.pad_token, len(loaded)) == ("</s>", 261)


def test_without_any_special_token_no_text_becomes_padding(tmp_path):
    whole = json.loads(tok().backend_tokenizer.to_str())
    whole["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)))
    loaded = load(base(tmp_path / "base", tokenizer))
    assert loaded.pad_token is None and pad_id(loaded) == 0
    assert loaded.decode(list(range(5, 261)), skip_special_tokens=True) == tok().decode(list(range(5, 261)))


# -- added tokens ---------------------------------------------------------------------------------------------------------


def test_ids_go_on_at_the_end_in_the_given_order(files):
    tokenizer = load(files, "kilowort", "<tool>", "[CALL]", "zwei wort")
    assert added_token_ids(tokenizer, ["<tool>", "kilowort", "[CALL]", "zwei wort"]) == [262, 261, 263, 264]
    ids = tokenizer("a kilowort<tool>[CALL]zwei wortb").input_ids
    assert [i for i in ids if i > 260] == [261, 262, 263, 264]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a kilowortzwei wortb"


def test_a_token_that_exists_keeps_its_id(files):
    tokenizer = load(files, "<|im_start|>", "<tool>")
    assert added_token_ids(tokenizer, ["<|im_start|>", "<tool>"]) == [4, 261] and len(tokenizer) == 262


def test_a_new_token_never_takes_the_row_of_another(tmp_path):
    """Where the vocabulary has holes, the highest id counts, and the library's next id may be in use."""

    def with_token_at(place, name):
        whole = json.loads(tok().backend_tokenizer.to_str())
        whole["model"]["vocab"]["ĊĊ"] = place
        return load(base(tmp_path / name, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)))))

    far, near = with_token_at(300, "far"), with_token_at(262, "near")
    assert new_rows(272, far) == 29
    add_tokens(far, ["<tool>"])
    assert added_token_ids(far, ["<tool>"]) == [262]
    with pytest.raises(RecipeError, match="no free id for '<tool>'"):
        add_tokens(near, ["<tool>"])


@pytest.mark.parametrize(("tokens", "words"), [(["<a>", " "], "add_tokens\\[1\\]"), (["<a>", "<a>"], "twice")])
def test_faulty_tokens(files, tokens, words):
    with pytest.raises(RecipeError, match=words):
        load(files, *tokens)


def test_rows_grow_only_when_an_id_does_not_fit(files):
    tokenizer = load(files, "<1>", "<2>", "<3>")
    assert [new_rows(rows, tokenizer) for rows in (261, 263, 264, 288)] == [3, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 0.05])
def test_new_rows_look_like_old_ones(dtype, mean):
    torch.manual_seed(0)
    weight = (torch.randn(300, 64) * 0.02 + mean).to(dtype)
    before = weight.clone()
    init_new_rows(weight, 292, seed=7)
    assert torch.equal(weight[:292], before[:292])
    norms = weight.float().norm(dim=1)
    typical = norms[:292].mean()
    assert (norms[292:] > typical / 3).all() and (norms[292:] < typical * 3).all()
    far = (weight[292:].float() - before[:292].float().mean(0)).norm(dim=1)
    assert (far < typical).all() and len(weight[292:].unique(dim=0)) == 8


def test_new_rows_depend_on_the_seed_alone():
    def rows(seed, dtype=torch.float32, count=4):
        torch.manual_seed(0)
        weight = torch.randn(20000 + count, 4).to(dtype)  # more than one block of rows
        init_new_rows(weight, 20000, seed)
        return weight[20000:]

    first = rows(1)
    torch.manual_seed(99)
    assert torch.equal(rows(1), first) and not torch.equal(rows(2), first)
    assert torch.allclose(rows(1, torch.bfloat16).float(), first, atol=0.02)


def test_new_rows_of_a_bias_and_of_nothing():
    bias = torch.cat([torch.full((10,), 3.0), torch.zeros(2)])
    init_new_rows(bias, 10, 0)
    assert bias.tolist() == [3.0] * 12
    init_new_rows(bias, 12, 0)


# -- chat template --------------------------------------------------------------------------------------------------------


def test_template_by_text_and_by_file(tmp_path):
    tokenizer = tok()
    assert set_chat_template(tokenizer, CHATML_GEN) == CHATML_GEN == tokenizer.chat_template
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    set_chat_template(tokenizer, str(tmp_path / "mine.jinja"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_template_faults(tmp_path):
    for value, words in [
        ("no/such.jinja", "does not exist"),
        ("a\n{% if x %}\n{% endfor %}", "line 3"),
        (str(tmp_path), "does not exist"),
    ]:
        with pytest.raises(RecipeError, match=words) as caught:
            set_chat_template(tok(), value)
        assert caught.value.where == "data.chat_template"


# -- writing --------------------------------------------------------------------------------------------------------------


def names(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_unchanged_files_are_copied_byte_for_byte_and_nothing_else(files, tmp_path):
    extra = {
        "special_tokens_map.json": b'{"eos_token": "</s>"}',
        "vocab.json": b"{}",
        "merges.txt": b"#version: 0.2\n",
        "tokenizer.model": b"\x00\x01",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    }
    (files.folder / "additional_chat_templates").mkdir()
    for name, data in extra.items():
        (files.folder / name).write_bytes(data)
    for name in ("model.safetensors", "README.md", "modeling_own.py", "preprocessor_config.json"):
        (files.folder / name).write_bytes(b"x")
    tokenizer = load(files)
    save_tokenizer(tokenizer, files, tmp_path / "out", changed=False, chat_template=None)
    expected = {*extra, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names(tmp_path / "out") == expected
    assert all((tmp_path / "out" / n).read_bytes() == (files.folder / n).read_bytes() for n in expected)


def test_links_of_a_hub_cache_become_files(files, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in files.folder.iterdir():
        (linked / path.name).symlink_to(path)
    save_tokenizer(load(files), ModelFiles(linked, "o/x"), tmp_path / "out", changed=False, chat_template=None)
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("embedded", [True, False])
def test_a_new_template_wins_wherever_the_base_kept_its_own(files, tmp_path, embedded):
    if embedded:
        edit(files.folder / "tokenizer_config.json", chat_template="OLD")
        (files.folder / "chat_template.jinja").unlink()
        (files.folder / "chat_template.json").write_text('{"chat_template": "OLD"}')
    (files.folder / "additional_chat_templates").mkdir()
    (files.folder / "additional_chat_templates" / "tool_use.jinja").write_text("OLD")
    tokenizer = load(files)
    new = set_chat_template(tokenizer, "NEW{{ messages[0].content }}")
    out = tmp_path / "out"
    save_tokenizer(tokenizer, files, out, changed=False, chat_template=new)
    assert "OLD" not in "".join(p.read_text() for p in out.iterdir()) and "additional_chat_templates" not in names(out)
    assert AutoTokenizer.from_pretrained(out).chat_template == new
    assert (out / "chat_template.jinja").read_text() == new
    assert (out / "tokenizer.json").read_bytes() == (files.folder / "tokenizer.json").read_bytes()
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config.get("chat_template") == (new if embedded else None)


def check_reload(out, tokenizer, *tokens):
    """Plain libraries read the same ids as the tokenizer in memory."""
    text = PROBE + "".join(f"a{t}b" for t in tokens)
    ids = tokenizer(text).input_ids
    bare, auto = Tokenizer.from_file(str(out / "tokenizer.json")), AutoTokenizer.from_pretrained(out)
    assert bare.encode(text).ids == auto(text).input_ids == ids
    for skip in (True, False):
        assert auto.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert bare.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    return auto


def test_added_tokens_are_put_into_the_files_of_the_base(files, tmp_path):
    tokenizer = load(files, "<tool>", "kilowort")
    save_tokenizer(tokenizer, files, tmp_path / "out", changed=True, chat_template=None)
    check_reload(tmp_path / "out", tokenizer, "<tool>", "kilowort")
    old, new = (json.loads((f / "tokenizer.json").read_text()) for f in (files.folder, tmp_path / "out"))
    assert new["added_tokens"][:-2] == old["added_tokens"] and {**new, "added_tokens": 0} == {**old, "added_tokens": 0}
    old, new = (json.loads((f / "tokenizer_config.json").read_text()) for f in (files.folder, tmp_path / "out"))
    decoder = new.pop("added_tokens_decoder")
    assert new == old
    assert (decoder["261"]["content"], decoder["261"]["special"]) == ("<tool>", True)
    assert (decoder["262"]["content"], decoder["262"]["special"]) == ("kilowort", False)


def test_added_tokens_where_only_the_map_names_special_ones(files, tmp_path):
    """transformers reads special_tokens_map.json only where there is no added_tokens_decoder."""
    path = files.folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in ("eos_token", "pad_token")}))
    (files.folder / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "</s>", "lstrip": false}, "pad_token": "<|pad|>"}'
    )
    tokenizer = load(files, "<tool>")
    save_tokenizer(tokenizer, files, tmp_path / "out", changed=True, chat_template=None)
    auto = check_reload(tmp_path / "out", tokenizer, "<tool>")
    assert (auto.eos_token, auto.pad_token) == (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<|pad|>")


def test_added_tokens_and_the_older_files(files, tmp_path):
    decoder = {
        "0": {
            "content": "<|im_end|>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
    }
    edit(files.folder / "tokenizer_config.json", added_tokens_decoder=decoder)
    (files.folder / "added_tokens.json").write_text('{"<|im_end|>": 0}')
    tokenizer = load(files, "<tool>")
    save_tokenizer(tokenizer, files, tmp_path / "out", changed=True, chat_template=None)
    check_reload(tmp_path / "out", tokenizer, "<tool>")
    assert json.loads((tmp_path / "out" / "added_tokens.json").read_text()) == {"<|im_end|>": 0, "<tool>": 261}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["added_tokens_decoder"]["0"] == decoder["0"]


def test_added_tokens_on_a_vocabulary_without_tokenizer_json(tmp_path):
    """GPT-2's older form: vocab.json and merges.txt."""
    folder = tmp_path / "base"
    folder.mkdir()
    vocab = json.loads(tok().backend_tokenizer.to_str())["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "bos_token": "</s>",
        "unk_token": "</s>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files = ModelFiles(folder, "o/gpt2")
    tokenizer = load(files, "<tool>", "kilowort")
    first = len(vocab)
    assert added_token_ids(tokenizer, ["<tool>", "kilowort"]) == [first, first + 1]
    save_tokenizer(tokenizer, files, tmp_path / "out", changed=True, chat_template=None)
    auto = check_reload(tmp_path / "out", tokenizer, "<tool>", "kilowort")
    assert auto.chat_template == CHATML
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert {k: written[k] for k in config} == config


def test_a_moved_id_is_an_error(files, tmp_path):
    tokenizer = load(files)
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    whole = json.loads((files.folder / "tokenizer.json").read_text())
    whole["added_tokens"].append({**whole["added_tokens"][0], "id": 261, "content": "<other>"})
    (files.folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="<tool>"):
        save_tokenizer(tokenizer, files, tmp_path / "out", changed=True, chat_template=None)
