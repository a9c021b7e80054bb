"""From a conversation to ids and labels: the one place of masks, used by train, eval, check, chat and export alike."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from swiftlite.data.control import ALLOW, ControlTokens
from swiftlite.data.formats import Conversation, RowError
from swiftlite.data.labels import IGNORE as IGNORE
from swiftlite.data.labels import Offsets
from swiftlite.data.labels import label_spans as label_spans
from swiftlite.data.messages import read_messages
from swiftlite.data.template import CHATML_LITE, AlteredError, Message, Template, trainable
from swiftlite.recipe.errors import DataError, ModelError

TrainOn = Literal["assistant", "last", "all", "completion"]
Mismatch = Literal["split", "last", "error"]


@dataclass(slots=True)
class Sample:
    """A row as the model gets it; `labels[t]` is `input_ids[t]` where that token is trained, else IGNORE (unshifted).

    Nothing predicts the first token, so `labels[0]` is always IGNORE.
    """

    input_ids: list[int]
    labels: list[int]
    source: str

    @property
    def trained(self) -> int:
        return len(self.labels) - self.labels.count(IGNORE)


@dataclass(frozen=True)
class Lessons:
    """What rows taught a renderer: notes by what they are about, proven end-of-turn tokens, a template where there was none."""

    notes: dict[str, str]
    stop_tokens: list[str]
    chat_template: str | None


class Renderer:
    """Renders rows with one tokenizer and its chat template.

    Chat rows get the ids of `apply_chat_template`, tokenised once. Text and prompt/completion text get the tokenizer's bos
    once, if it adds one, and its eos at the end, which is trained; rows of segments end as they write it.

    Args:
        chat_template: replaces the tokenizer's template.
        allow_control_tokens: control tokens spelled in messages become such; else only those that the template writes are.
        free_tokens: special tokens that messages may spell all the same, as those of model.add_tokens.
        history_mismatch: what becomes of rows whose earlier turns the template alters, see `samples`.
        vocab_size: ids that the model has, for rows made of ids; default the tokenizer's.

    Raises:
        ModelError: the tokenizer cannot tell which characters a token came from.
        RecipeError: wrong template or template_kwargs.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: TrainOn = "assistant",
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        history_mismatch: Mismatch = "split",
        allow_control_tokens: bool = False,
        free_tokens: Sequence[str] = (),
        vocab_size: int | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            what = f"{type(tokenizer).__name__} is a slow tokenizer and gives no character offsets, so masks cannot be proven."
            raise ModelError(what, where=tokenizer.name_or_path or None, fix="Use a model folder with a tokenizer.json.")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.template_kwargs = dict(template_kwargs or {})
        self.history_mismatch = history_mismatch
        self.vocab_size = vocab_size or len(tokenizer)
        self.eos: int | None = tokenizer.eos_token_id
        # Then a call of it comes down to its backend, which is a quarter faster for short rows.
        self._is_plain = (
            getattr(type(tokenizer), "_encode_plus", None) is getattr(PreTrainedTokenizerFast, "_encode_plus", self)
            and not getattr(tokenizer, "split_special_tokens", False)
            and not tokenizer.backend_tokenizer.encode_special_tokens
        )
        self._control = None if allow_control_tokens else ControlTokens(tokenizer, free_tokens)
        self.bos: list[int] = self._added_in_front()
        self._given, self._chat_template = chat_template, chat_template
        self._allow = [allow_control_tokens, *free_tokens]
        self._forget()

    @property
    def template(self) -> str | dict[str, str] | None:
        """The chat template in use, to be exported with the model; None where there is none and no chat row asked for one."""
        return self._chat_template or self.tokenizer.chat_template

    def _forget(self) -> None:
        self._templates: dict[str, Template] = {}
        self._learned: set[str] = set()
        self._notes: dict[str, str] = {}

    def fresh(self) -> "Renderer":
        """This renderer as it was before it saw a row, so that what rows teach depends on those rows alone."""
        other = copy(self)
        other._chat_template = self._given
        other._forget()
        return other

    @property
    def keys(self) -> dict[str, Any]:
        """All that decides over what it makes of a row, but for the tokenizer itself."""
        return {
            "train_on": self.train_on,
            "template": self.template,
            "template_kwargs": self.template_kwargs,
            "history_mismatch": self.history_mismatch,
            "control_tokens": self._allow,
            "vocab_size": self.vocab_size,
        }

    @property
    def lessons(self) -> Lessons:
        """What its rows taught."""
        own = self._chat_template if self._chat_template != self._given else None
        return Lessons(dict(self._notes), sorted(self._stop_tokens), own)

    def learn(self, lessons: Lessons) -> None:
        """Takes over what rows taught another renderer of the same tokenizer and keys."""
        for about, note in lessons.notes.items():
            self._notes.setdefault(about, note)
        self._learned.update(lessons.stop_tokens)
        self._chat_template = lessons.chat_template or self._chat_template

    @property
    def notes(self) -> list[str]:
        """What a user should know about the rendering, in the order in which rows showed it."""
        return list(self._notes.values())

    @property
    def _stop_tokens(self) -> set[str]:
        return self._learned.union(*(template.stop_tokens for template in self._templates.values()))

    @property
    def stop_ids(self) -> set[int]:
        """End-of-turn tokens that were proven so far, and eos."""
        tokens = self._stop_tokens
        ids = {cast(int, self.tokenizer.convert_tokens_to_ids(token)) for token in tokens}
        return ids | ({self.eos} if self.eos is not None else set())

    @cached_property
    def control_ids(self) -> set[int]:
        """Eos and every added token."""
        return {*self.tokenizer.added_tokens_decoder, *([] if self.eos is None else [self.eos])}

    def samples(self, conv: Conversation) -> list[Sample]:
        """What is trained of one row: itself, but where the template alters earlier turns (as by leaving out their reasoning)
        one sample for the trained turns behind each question (split) or for the last turn (last), as inference sees them then.

        Raises:
            RowError, DataError: as `sample`; with history_mismatch error also for altered rows.
        """
        try:
            return [self.sample(conv)]
        except AlteredError:
            if self.history_mismatch == "error":
                raise
        turns = [i for i in trainable(conv.messages) if i >= self._first(conv)]
        if self.history_mismatch == "last":
            samples = self._up_to(conv, turns[-1:])
            done = "has only its last answer trained"
        else:
            parts = groupby(turns, key=lambda i: sum(m["role"] == "user" for m in conv.messages[:i]))
            samples = [sample for _, part in parts for sample in self._up_to(conv, list(part))]
            done = "becomes one row for the answers to each question"
        note = f"the chat template alters earlier turns when later ones follow: a row where it does {done}"
        self._say(f"{note} (data.history_mismatch: {self.history_mismatch})")
        return samples

    def _up_to(self, conv: Conversation, turns: list[int]) -> list[Sample]:
        """The conversation up to these turns, which answer one question: together, or one by one where they alter each other."""
        try:
            return [self.sample(replace(conv, messages=conv.messages[: turns[-1] + 1], completion_from=turns[0]))]
        except AlteredError:
            if len(turns) == 1:
                raise
        return [sample for turn in turns for sample in self._up_to(conv, [turn])]

    def sample(self, conv: Conversation) -> Sample:
        """Ids and labels of one row as a whole.

        Raises:
            AlteredError: the template alters a trained turn when later ones follow.
            RowError: the row cannot be rendered, or what is trained cannot be proven.
            DataError: `train_on` means nothing for rows of this kind.
        """
        if self.train_on == "completion" and conv.kind == "chat" and conv.completion_from is None:
            fix = "Use data.train_on: last to train the last answer, or assistant for all."
            raise DataError("chat rows have no completion.", where=f"{conv.source}: data.train_on", fix=fix)
        ids, labels = {"chat": self._chat, "tokens": self._tokens}.get(conv.kind, self._text)(conv)
        if labels:
            labels[0] = IGNORE
        return Sample(ids, labels, conv.source)

    def prompt(self, messages: Sequence[Message] | str, tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids to generate from: the template with its generation prompt, or plain text behind the tokenizer's bos."""
        if isinstance(messages, str):
            return self._with_bos(self._encode(messages)[0])
        messages, template = read_messages(list(messages)), self._template_for(tools)
        if self._control is None or not self._control.first([messages, tools]):
            return self._encode(template.render(messages, tools, prompt=True))[0]
        hidden = template.render(*self._hidden(template, messages, tools), prompt=True)
        return self._encode_hidden(hidden, template.render(messages, tools, prompt=True))[0]

    def _chat(self, conv: Conversation) -> tuple[list[int], list[int]]:
        messages, tools, template = conv.messages, conv.tools, self._template_for(conv.tools)
        if self.train_on == "all" and not all(m.get("train", True) for m in messages):
            raise RowError("message flag", "a message is not to be trained, but data.train_on is all")
        spelled = self._control.first([messages, tools]) if self._control else None
        if spelled:
            messages, tools = self._hidden(template, messages, tools)
        text, spans = template.turns(messages, tools, self._first(conv))
        if spelled:
            original = template.render(conv.messages, conv.tools)
            ids, offsets = self._encode_hidden(text, original)
            text = original
            self._say_neutralised(spelled, conv.source)
        else:
            ids, offsets = self._encode(text)
        if self.train_on == "all":
            spans = [(0, len(text))]
        return ids, label_spans(text, ids, offsets, spans)

    def _first(self, conv: Conversation) -> int:
        """The first message whose turns have to be proven."""
        turns = [i for i, message in enumerate(conv.messages) if message["role"] == "assistant"]
        first = conv.completion_from or 0
        if self.train_on == "last" and turns:
            return max(first, turns[-1])
        return len(conv.messages) if self.train_on == "all" else first  # all: every token is trained

    def _text(self, conv: Conversation) -> tuple[list[int], list[int]]:
        text = conv.text if conv.kind == "text" else conv.prompt + conv.completion
        ids, offsets = self._encode(text)
        whole = conv.kind == "text" or self.train_on == "all"
        spans = [(0 if whole else len(conv.prompt), len(text))] if conv.spans is None or self.train_on == "all" else conv.spans
        labels = label_spans(text, ids, offsets, spans)
        bos = len(self._with_bos(ids)) - len(ids)
        ids, labels = self._with_bos(ids), [IGNORE] * bos + labels
        if self.eos is not None and text and conv.spans is None and ids[-1:] != [self.eos]:
            ids, labels = [*ids, self.eos], [*labels, self.eos]
        return ids, labels

    def _tokens(self, conv: Conversation) -> tuple[list[int], list[int]]:
        labels = conv.labels if conv.labels is not None else conv.input_ids
        for name, values in (("input_ids", conv.input_ids), ("labels", [i for i in labels if i != IGNORE])):
            wrong = next((i for i in values if not 0 <= i < self.vocab_size), None)
            if wrong is not None:
                raise RowError("not tokens", f"{name} holds {wrong}; the model has ids 0 to {self.vocab_size - 1}")
        return list(conv.input_ids), list(labels)

    def _encode(self, text: str) -> tuple[list[int], Offsets]:
        """Ids and the characters [start, end) that each came from, without bos or eos of the tokenizer's own."""
        backend = self.tokenizer.backend_tokenizer
        try:
            if self._is_plain and backend.truncation is None and backend.padding is None:
                encoding = backend.encode(text, add_special_tokens=False)
                # Normalizers may put characters in another order, as NFC does with accents; none does so with ASCII.
                return encoding.ids, encoding if backend.normalizer is None or text.isascii() else encoding.offsets
            out = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise RowError("not text", "it holds half of a character, a lone surrogate like \\ud800") from error
        return out["input_ids"], out["offset_mapping"]

    def _hidden(self, template: Template, messages: list[Message], tools: Any) -> tuple[list[Message], Any]:
        """Messages and tools with stand-ins for spelled control tokens. What the template takes out of answers it is to find."""
        assert self._control is not None
        hide = self._control.hide
        parts = [hide(m, template.parsed if m["role"] == "assistant" else frozenset()) for m in messages]
        return parts, hide(tools)

    def _encode_hidden(self, hidden: str, original: str) -> tuple[list[int], Offsets]:
        assert self._control is not None
        if self._control.unhide(hidden) != original:
            raise RowError("control tokens", f"the chat template does more than write them where a text spells them; {ALLOW}")
        try:
            return self._control.encode(hidden)
        except (UnicodeEncodeError, TypeError) as error:
            raise RowError("not text", "it holds half of a character, a lone surrogate like \\ud800") from error

    def _say_neutralised(self, token: str, source: str) -> None:
        what = "encoded as plain text (data.allow_control_tokens: false)"
        self._say(f"texts spell control tokens, as {token} at {source}: {what}", about="spelled")

    def _added_in_front(self) -> list[int]:
        plain, full = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        return next((full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain), [])

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self.bos)] == self.bos else self.bos + ids

    def _template_for(self, tools: list[dict[str, Any]] | None) -> Template:
        if self.template is None:
            self._chat_template = self._chatml_lite()
        text = self.tokenizer.get_chat_template(self._chat_template, tools)
        if text not in self._templates:
            self._templates[text] = Template(text, self.tokenizer, self.template_kwargs)
            self._note(self._templates[text])
        return self._templates[text]

    def _chatml_lite(self) -> str:
        if self.eos is None:
            what = "the tokenizer has neither a chat template nor an eos token to close turns with."
            raise DataError(what, fix="Give a template with data.chat_template.")
        self._say("the model has no chat template: swiftlite's own 'chatml-lite' is used and exported with the model")
        return ("{{ bos_token }}" if self.bos and self.bos == [self.tokenizer.bos_token_id] else "") + CHATML_LITE

    def _say(self, note: str, about: str = "") -> None:
        """Notes `note`, unless one `about` the same is there, whatever it says."""
        self._notes.setdefault(about or note, note)

    def _note(self, template: Template) -> None:
        shape, bos = template.shape, self.tokenizer.bos_token
        if shape.closing is None and not shape.ending_closes:
            what = "the model is taught where to stop by the next role's token, if that is one, and not by a last answer"
            self._say(f"the chat template writes no control token behind an answer: {what}")
        if shape.header.strip():
            self._say(f"the chat template writes {shape.header!r} before answers, not in its generation prompt: trained")
        if self.bos and bos and "bos_token" not in template.text and bos not in template.text:
            self._say(f"the tokenizer puts {bos} in front of plain text, the chat template does not: chat rows have none")
