"""Control tokens that a text merely spells: `<|im_end|>` in a message is text, only the chat template writes control tokens.

For a row that spells one, every spelling is replaced by a stand-in of the same length before the template is rendered. What
then still reads as a control token was written by the template. Encoding goes through a copy of the tokenizer that knows
control tokens under other names alone, again of the same length: the text around them, merges, offsets, and white space that
a control token takes in stay what they are, which cutting the text into pieces would not ensure.
"""

import re
from collections.abc import Collection, Set
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from swiftlite.data.formats import RowError

# Private-use characters of plane 16, one a token: the first half names control tokens, the second stands in for spellings.
NAMES, STANDINS = 0x100000, 0x108000
PRIVATE = re.compile("[\U00100000-\U0010ffff]")
ALLOW = "data.allow_control_tokens: true takes such texts as they stand"


class ControlTokens:
    """The special tokens of one tokenizer. Added tokens that are not special, as <think> often is, may be spelled by anyone.

    Args:
        free: special tokens that may be spelled too, as those that a recipe adds for its rows to use.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, free: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        special = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content}
        self._tokens = list(special.values())
        self._ids = list(special)
        self._free = frozenset(free)
        longest_first = sorted((token.content for token in self._tokens), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names = {token.content: chr(NAMES + n) * len(token.content) for n, token in enumerate(self._tokens)}
        self._standins = {token.content: chr(STANDINS + n) * len(token.content) for n, token in enumerate(self._tokens)}
        self._originals = {standin: token for token, standin in self._standins.items()}
        self._standin = re.compile("|".join(f"(?:{standin})" for standin in self._originals) or r"(?!)")
        self._copy: Tokenizer | None = None

    def first(self, value: Any) -> str | None:
        """A control token that a text within `value` (texts, lists, dicts) spells."""
        if isinstance(value, str):
            if self._spelled.search(value) is None:  # as in nearly all texts
                return None
            return next((m.group() for m in self._spelled.finditer(value) if m.group() not in self._free), None)
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        if isinstance(value, list):
            for item in value:
                if item is not None and (found := self.first(item)):
                    return found
        return None

    def hide(self, value: Any, keep: Set[str] = frozenset()) -> Any:
        """`value` with stand-ins for every spelled control token but those in `keep`.

        Raises:
            RowError: the row uses the characters of the stand-ins.
        """
        if isinstance(value, str):
            if PRIVATE.search(value):
                raise RowError("control tokens", f"spelled beside private-use characters of plane 16; {ALLOW}")
            keep = keep | self._free
            return self._spelled.sub(lambda m: m.group() if m.group() in keep else self._standins[m.group()], value)
        if isinstance(value, dict):
            return {self.hide(key, keep): self.hide(item, keep) for key, item in value.items()}
        return [self.hide(item, keep) for item in value] if isinstance(value, list) else value

    def unhide(self, text: str) -> str:
        return self._standin.sub(lambda m: self._originals[m.group()], text)

    def encode(self, hidden: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and characters [start, end) of a rendering with stand-ins, in which only the template's control tokens are such.

        Raises:
            RowError: the tokenizer's vocabulary itself reads a spelling as a control token.
        """
        named, written = self._spelled.subn(lambda m: self._names[m.group()], hidden)
        encoded = self._plain().encode(self.unhide(named), add_special_tokens=False)
        if any(i in self._real for i in encoded.ids):
            pairs = zip(encoded.ids, encoded.tokens, strict=True)
            token = next(token for i, token in pairs if i in self._real)
            raise RowError("control tokens", f"the tokenizer reads {token!r} in a text as a control token in any case; {ALLOW}")
        if sum(i in self._by_name for i in encoded.ids) != written:
            raise RowError("control tokens", f"the tokenizer does not read every one that the chat template writes; {ALLOW}")
        return [self._by_name.get(i, i) for i in encoded.ids], encoded.offsets

    def _plain(self) -> Tokenizer:
        if self._copy is None:
            copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            copy.no_truncation()
            copy.no_padding()
            copy.encode_special_tokens = True  # the special ones become ordinary text, their new names are not special
            for token in self._tokens:
                kind = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": token.normalized}
                name = self._names[token.content]
                copy.add_tokens([AddedToken(name, single_word=token.single_word, special=False, **kind)])
            names = (copy.token_to_id(self._names[token.content]) for token in self._tokens)
            self._by_name = dict(zip(names, self._ids, strict=True))
            self._real, self._copy = set(self._ids), copy
        return self._copy
