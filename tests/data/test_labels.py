"""Short ways to labels find what looking at every token finds."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from swiftlite.data import labels
from swiftlite.data.labels import IGNORE, label_spans
from swiftlite.data.render import Renderer
from tests.fixtures import tok

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "user",
    "hello",
    " world",
    "é",
    "e\u0301",
    "中文",
    "😀",
    "a",
    "\u3000",
]


def by_every_token(text: str, ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """A token counts by its first character that is not white space; one without width reaches back to the token before it."""
    found, edge = [], 0
    for i, (start, end) in zip(ids, offsets, strict=True):
        start, edge = (edge if start == end else start), max(edge, end)
        at = next((c for c in range(start, end) if not text[c].isspace()), start)
        found.append(i if any(low <= at < high for low, high in spans) else IGNORE)
    return found


def spans_in(text: str, chance: random.Random) -> list[tuple[int, int]]:
    cuts = sorted(chance.sample(range(len(text) + 1), min(len(text) + 1, 2 * chance.randint(1, 3))))
    return list(zip(cuts[::2], cuts[1::2], strict=False))


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("merge_newlines", [False, True])
def test_every_way_gives_the_same_labels(monkeypatch: pytest.MonkeyPatch, trim_offsets: bool, merge_newlines: bool):
    backend = tok(trim_offsets=trim_offsets, merge_newlines=merge_newlines).backend_tokenizer
    chance = random.Random(0)
    for _ in range(1500):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randint(1, 30)))
        encoding, spans = backend.encode(text, add_special_tokens=False), spans_in(text, chance)
        wanted = by_every_token(text, encoding.ids, encoding.offsets, spans)
        assert label_spans(text, encoding.ids, encoding.offsets, spans) == wanted, (text, spans)
        with monkeypatch.context() as patch:
            if not trim_offsets:  # then every character is in a token, and the encoding alone is enough
                patch.setattr(labels, "_first_token", None)
            assert label_spans(text, encoding.ids, encoding, spans) == wanted, (text, spans)


def test_tokens_in_another_order_than_their_text():
    text, ids, offsets = "ab cd", [1, 2, 3], [(3, 5), (0, 1), (1, 3)]
    assert label_spans(text, ids, offsets, [(3, 5)]) == [1, IGNORE, IGNORE]
    assert label_spans("", [], [], [(0, 0)]) == []


def test_the_short_way_to_ids_is_taken_only_where_it_is_the_tokenizers_own():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **keys):  # type: ignore[no-untyped-def]
            return super()._encode_plus(text.upper(), **keys)

    plain = tok()
    texts = ["hi <|im_end|> there", "Ünï", ""]
    for text in texts:
        ids, _ = Renderer(plain)._encode(text)
        assert ids == plain(text, add_special_tokens=False)["input_ids"]
    own = Own(tokenizer_object=plain.backend_tokenizer, bos_token="<s>")
    assert Renderer(own)._encode("hi")[0] == plain("HI", add_special_tokens=False)["input_ids"]
    renderer = Renderer(plain)
    plain.backend_tokenizer.enable_truncation(2)
    plain.backend_tokenizer.enable_padding(length=9)
    assert len(renderer._encode("abcd")[0]) == 4
    composed = tok()
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    renderer = Renderer(composed)
    assert isinstance(renderer._encode("é")[1], list) and not isinstance(renderer._encode("e")[1], list)
