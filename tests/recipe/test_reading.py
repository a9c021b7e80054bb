"""Strict YAML 1.2 with places."""

import pytest

from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.reading import Faults, mask, number, parse, scalar
from swiftlite.recipe.validate import plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E-5", 1e-5), ("1.0e-5", 1e-5), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("+3", 3), ("0", 0), ("007", 7),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
    ],
)  # fmt: skip
def test_a_plain_word_means_what_yaml_1_2_says(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


@pytest.mark.parametrize("text", "no off on yes 1e 1_000 .inf .nan 1e999 0x10 1:30 2024-01-01 fast - . e5 +".split())
def test_other_words_are_texts(text):
    assert scalar(text) == text


def test_numbers_in_quotes_may_have_underscores_but_not_be_infinite():
    assert number("1_000") == 1000
    assert number("inf") is number("nan") is number("1e999") is number("") is number("e5") is None


def test_every_value_knows_its_line_and_spelling():
    root = parse("a:\n  b: 'x'\n  c: [1, 1e-5]\n", "r.yaml", Faults())
    assert plain(root) == {"a": {"b": "x", "c": [1, 1e-5]}}
    section = root.value["a"]
    assert (section.where, section.value["b"].where, section.value["b"].text) == ("r.yaml:1", "r.yaml:2", "'x'")
    assert (section.value["c"].value[1].text, section.value["c"].value[1].key) == ("1e-5", "a.c[1]")


def test_anchors_are_read_but_not_aliases_of_themselves():
    assert plain(parse("a: &x {b: 1}\nc: *x\n", "r.yaml", Faults())) == {"a": {"b": 1}, "c": {"b": 1}}
    with pytest.raises(RecipeError, match="aliases of themselves"):
        parse("a: &x [*x]\n", "r.yaml", Faults())


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb:\n\tc: 2\n", 3, "tab"),
        ("a:\n  b: 1\n   c: 2\n", 3, "indentation"),
        ("a: 1\n b: 2\n", 2, "indentation"),
        ("a: x: y\n", 1, "quote"),
        ("a: *b\n", 1, "alias"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 1\n", 2, "one document"),
        ("a: !foo 1\n", 1, "tags"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tags"),
        ("- a\n", 1, "not a list"),
        ("a:1\n", 1, "space behind the colon"),
        ("? [a]\n: 1\n", 1, "a key is a word"),
        ("a: 1\nb: \x01\n", 2, "does not allow"),
    ],
)
def test_bad_yaml_is_told_with_its_line(text, line, words):
    with pytest.raises(RecipeError) as caught:
        parse(text, "r.yaml", Faults())
    assert str(caught.value).startswith(f"r.yaml:{line}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_an_empty_file_says_how_to_begin(text):
    with pytest.raises(RecipeError, match=r"empty.*model: org/name"):
        parse(text, "r.yaml", Faults())


def test_a_repeated_key_names_both_lines(refuse):
    message = refuse("seed: 1\ntrain:\n  optim: sgd\nseed: 2\n")
    assert message.startswith("r.yaml:6: seed: repeated key")
    assert "r.yaml:3" in message
    assert refuse("train:\n  optim: sgd\n  optim: adamw\n").startswith("r.yaml:5: train.optim: repeated key, first on r.yaml:4")


def test_lines_of_a_bad_file_are_shown_without_tokens():
    assert "hf_abcdefgh" not in mask("name: hf_abcdefgh")
    assert mask("api_key: 'wkey-1") == "api_key: ***"
    with pytest.raises(RecipeError) as caught:
        parse("a: b\n  hub_token: wkey-TESTONLY\n", "r.yaml", Faults())
    assert "wkey" not in str(caught.value)


def test_byte_order_mark_and_windows_lines(tmp_path):
    from swiftlite.recipe.load import load_recipe

    file = tmp_path / "r.yaml"
    file.write_bytes("\ufeffmodel: a/b\r\ndata: x.jsonl\r\nseed: 3\r\n".encode())
    loaded = load_recipe(str(file))
    assert (loaded.recipe.seed, loaded.origins["seed"]) == (3, f"{file}:3")
    file.write_bytes(b"model: a/b\ndata: \xff\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: not UTF-8"):
        load_recipe(str(file))
