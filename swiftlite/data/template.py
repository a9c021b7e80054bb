"""A chat template: one rendering of a conversation, and which of its characters are assistant turns, proven per row.

Two proofs. Templates with `{% generation %}` markers say it themselves. For all others the conversation is rendered up to
each turn, once with the generation prompt and once with the answer; both must be prefixes of the full rendering. What stands
between them is the turn, exactly as inference would have to write it. A row without a proof is refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from swiftlite.data.formats import RowError
from swiftlite.data.labels import Span
from swiftlite.recipe.errors import RecipeError, nearest

Message = dict[str, Any]


class AlteredError(RowError):
    """An assistant turn reads otherwise as the last message than inside the conversation."""


# What render_jinja_template renders with, once it has copied all data into plain types, which most rows are made of already.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt")
_compiled: Callable[[str], Any] | None = getattr(chat_template_utils, "_compile_jinja_template", None)

MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING = ["reasoning_content", "reasoning", "thinking"]
# Texts that no template contains, for finding out where a template puts contents.
ASK, REPLY, MORE, STANDIN = "Qzqask", "Qzqreply", "Qzqmore", "Qzqstandin"

# For base models. Plain words instead of new control tokens, whose embeddings LoRA would leave untrained; the model's own
# eos closes every turn.
CHATML_LITE = (
    "{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What a template writes around contents, learned from a two-turn conversation of its own.

    Args:
        prompt: the generation prompt; None where it could not be told apart.
        header: text between the generation prompt and the answer, as an empty reasoning block.
        closing: text from the end of an answer to the end of its end-of-turn token; None where there is none.
        ending: text that only the last turn of a conversation gets, as an eos behind the last <|end|>.
        ending_closes: the ending holds the only end-of-turn token, so it belongs to the answer.
    """

    prompt: str | None = None
    header: str = ""
    closing: str | None = None
    ending: str = ""
    ending_closes: bool = False


def template_text(value: str) -> str:
    """The template behind data.chat_template: the text of a Jinja file, or `value` itself if it is a template.

    Raises:
        RecipeError: a path where no file is.
    """
    if "{" in value:
        return value
    try:
        return Path(value).expanduser().read_text("utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read '{value}': {error.strerror}.", where="data.chat_template") from None


class Template:
    """One chat template of one tokenizer.

    Raises:
        RecipeError: the template is not valid Jinja, or it reads none of a name in `variables`.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        self.text = text
        self.marked = bool(MARKER.search(text))
        self.variables = {**tokenizer.special_tokens_map, **variables}
        self._simple = all(type(v) in (str, int, bool) and name not in GIVEN for name, v in self.variables.items())
        self._known: dict[str, Any] = {}
        for name in variables:
            words = set(re.findall(r"[A-Za-z_]\w*", text))
            if name not in words:
                what = f"the chat template reads no '{name}'.{nearest(name, words)}"
                raise RecipeError(what, where=f"data.template_kwargs.{name}")
        added = tokenizer.added_tokens_decoder
        tokens = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._special = {token.content for token in added.values() if token.special}
        # What the template looks for in contents, as the end of a reasoning block.
        sought = r"(?:split|replace|startswith|endswith|find|index)\(\s*['\"]{0}|['\"]{0}['\"]\s+(?:not\s+)?in\b"
        self.parsed = frozenset(token for token in self._special if re.search(sought.format(re.escape(token)), text))
        self.reasoning = [name for name in REASONING if re.search(rf"[.'\"]{name}\b", text)]
        self.stop_tokens: set[str] = set()
        self.shape = self._find_shape()

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, *, prompt: bool = False) -> str:
        """The conversation as text, with the generation prompt behind it if `prompt`.

        Raises:
            RowError: the template refuses the conversation.
        """
        return self._render(messages, tools, prompt, spans=False)[0]

    def turns(self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int) -> tuple[str, list[Span]]:
        """The full rendering, and the span of every assistant turn from message `first` on, with its end-of-turn token.

        Raises:
            AlteredError: a turn reads otherwise when it is the last message.
            RowError: the template refuses the conversation, would silently leave a part of it out, or a span is not proven.
        """
        self._check_reads(messages, tools)
        full, marked = self._render(messages, tools, False, spans=self.marked)
        self._check_written(messages, tools, full)
        wanted = [i for i in trainable(messages) if i >= first]
        spans = self._marked_turns(messages, tools, full, marked, wanted) if self.marked else None
        if spans is None:
            spans = [self._proven_turn(messages, tools, full, i) for i in wanted]
        else:
            self._check_history(messages, tools, full, wanted)
        for i in wanted:
            if any(str(messages[i].get(key) or "").strip() not in full for key in REASONING):
                raise RowError("left out by the chat template", f"it does not write the reasoning of message {i + 1}")
        return full, [self._closed(full, *self._trimmed(full, start, end)) for start, end in spans]

    def _render(self, messages: Sequence[Message], tools: Any, prompt: bool, *, spans: bool) -> tuple[str, list[Span]]:
        if any(m.get("tool_calls") for m in messages) and self._text_arguments:
            messages = [_with_text_arguments(m) for m in messages]
        if any(m.keys() - {"role", "content", "tool_calls"} for m in messages):
            messages = [self._in_its_words(m) for m in messages]
        return self._jinja(messages, tools, prompt, spans)

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether the template adds the arguments of a tool call to its text, so that they must be text and not an object."""
        for number in ("call00001", "0"):  # some refuse ids that are not of nine letters
            call = {"id": number, "type": "function", "function": {"name": "f", "arguments": {ASK: REPLY}}}
            asked: list[Message] = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                if str({ASK: REPLY}) not in self._jinja(asked, None, False, False)[0]:
                    return False
            except RowError:
                pass
            try:
                return self._jinja([_with_text_arguments(m) for m in asked], None, False, False)[0].count(REPLY) == 1
            except RowError:
                continue
        return False

    def _jinja(self, messages: Sequence[Message], tools: Any, prompt: bool, spans: bool) -> tuple[str, list[Span]]:
        try:
            plain = self._simple and all(len(m) == 2 and type(m.get("content")) is str for m in messages)
            if _compiled and plain and not spans and tools is None:
                template = _compiled(self.text)
                self._known = self._known or {**template.globals, **self.variables}  # put together once, not by each render
                given = dict(zip(GIVEN, (list(messages), None, None, prompt), strict=True))
                return "".join(template.root_render_func(template.new_context({**self._known, **given}, shared=True))), []
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **self.variables,
            )
        except TemplateSyntaxError as error:
            what = f"line {error.lineno} of the chat template is wrong: {error.message}."
            raise RecipeError(what, where="data.chat_template") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RowError("refused by the chat template", str(error)) from error
        (text,), found = rendered
        return text, found[0] if found else []

    def _check_reads(self, messages: Sequence[Message], tools: Any) -> None:
        present = {key for message in messages for key in message}
        read = {"tools": "tools" in self.text, "tool_calls": "tool_calls" in self.text}
        for key, is_read in (read | dict.fromkeys(REASONING, bool(self.reasoning))).items():
            if (key in present or (key == "tools" and tools)) and not is_read:
                raise RowError("left out by the chat template", f"the row has {key}, which the chat template does not write")

    def _in_its_words(self, message: Message) -> Message:
        """Reasoning under the name that this template reads, and no marks of ours."""
        known = {key: value for key, value in message.items() if key != "train"}
        for key in REASONING:
            if key in known and self.reasoning and key not in self.reasoning:
                known[self.reasoning[0]] = known.pop(key)
        return known

    def _check_written(self, messages: Sequence[Message], tools: Any, full: str) -> None:
        """A template may pass over a role or a place, as a system prompt that only a last question gets.

        Contents that stand in the rendering otherwise, as JSON or without their reasoning, show by changing with the content.
        """
        for i, message in enumerate(messages):
            if message.get("tool_calls"):
                self._check_calls(messages, tools, i)
            if message["content"].strip() in full:
                continue
            try:
                same = self.render([*messages[:i], {**message, "content": STANDIN}, *messages[i + 1 :]], tools) == full
            except RowError:
                continue  # it reads the content, if only to refuse it
            if same:
                what = f"it does not write the {message['role']} text of message {i + 1} into this conversation"
                raise RowError("left out by the chat template", what)

    def _check_calls(self, messages: Sequence[Message], tools: Any, i: int) -> None:
        """Names of calls stand in tools and answers too, so only other names tell whether the calls are written."""
        named = {"name": STANDIN}
        calls = [
            {**c, "function": {**c["function"], **named}} if isinstance(c.get("function"), dict) else {**c, **named}
            for c in messages[i]["tool_calls"]
        ]
        try:
            probe = self.render([*messages[:i], {**messages[i], "tool_calls": calls}, *messages[i + 1 :]], tools)
        except RowError:
            return
        if probe.count(STANDIN) < len(calls):
            raise RowError("left out by the chat template", f"it does not write the tool calls of message {i + 1}")

    def _find_shape(self) -> Shape:
        ask = {"role": "user", "content": ASK}
        reply = {"role": "assistant", "content": REPLY}
        try:
            asked, prompted = self.render([ask]), self.render([ask], prompt=True)
            once, twice = self.render([ask, reply]), self.render([ask, reply, {"role": "user", "content": MORE}, reply])
        except RowError:
            return Shape()
        if ASK not in prompted or once.count(REPLY) != 1:
            return Shape()
        prompt, header = None, ""
        if once.startswith(prompted):
            prompt, header = prompted[self._common(prompted, asked) :], once[len(prompted) : once.index(REPLY)]
        answered, both = once.index(REPLY) + len(REPLY), self._common(once, twice)
        # Where earlier turns are altered the two renderings part before the answer ends and tell nothing about the ending.
        ending = once[both:] if both >= answered else ""
        closing = self._closing(once[answered : len(once) - len(ending)])
        ending_closes = closing is None and self._closing(ending) is not None
        return Shape(prompt, header, closing, ending, ending_closes)

    def _common(self, one: str, other: str) -> int:
        """Length of the common prefix that does not cut through a control token of either text."""
        common = _common_length(one, other)
        starts = [m.start() for text in (one, other) for m in self._control.finditer(text) if m.start() < common < m.end()]
        return min(starts, default=common)

    def _closing(self, text: str) -> str | None:
        found = self._control.search(text)
        return text[: found.end()] if found and not text[: found.start()].strip() else None

    def _proven_turn(self, messages: list[Message], tools: Any, full: str, i: int) -> Span:
        last = i == len(messages) - 1
        try:
            if i == 0:
                raise RowError("no prompt", "the conversation starts with the assistant")
            prompt = self.render(messages[:i], tools, prompt=True)
            turn = full if last else self.render(messages[: i + 1], tools)
        except RowError:
            return self._by_standin(messages, tools, full, i)
        if not (last and self.shape.ending_closes):
            turn = turn.removesuffix(self.shape.ending)
        for part, what in ((prompt, "the generation prompt"), (turn, "the turn")):
            self._check_prefix(part, full, f"{what} of message {i + 1}", last)
        return len(prompt), len(turn)

    def _check_history(self, messages: list[Message], tools: Any, full: str, wanted: list[int]) -> None:
        """Markers prove where a turn is, not that inference would see it so: its prompt may be another, or be altered later."""
        for i in wanted:
            last = i == len(messages) - 1
            try:
                if i == 0:
                    continue
                prompt = self.render(messages[:i], tools, prompt=True)
                turn = full if last else self.render(messages[: i + 1], tools).removesuffix(self.shape.ending)
            except RowError:
                continue
            self._check_prefix(prompt, full, f"the generation prompt of message {i + 1}", last)
            self._check_prefix(turn, full, f"the turn of message {i + 1}", last)

    def _check_prefix(self, part: str, full: str, what: str, last: bool) -> None:
        if not full.startswith(part):
            at = self._common(part, full)
            alone, inside = part[at : at + 30], full[at : at + 30]
            detail = f"{what} reads {alone!r} when it is the last message, here it reads {inside!r}"
            fix = "data.history_mismatch: split trains every turn as it reads then, last the last one only"
            if last:
                fix = "data.template_kwargs or another data.chat_template can make the generation prompt agree with answers"
            raise AlteredError("altered by the chat template", f"{detail}; {fix}")

    def _by_standin(self, messages: list[Message], tools: Any, full: str, i: int) -> Span:
        """For turns whose prefix cannot be rendered: what moves when only this content is replaced is the content."""
        content = messages[i]["content"]
        probe = self.render([*messages[:i], {**messages[i], "content": STANDIN}, *messages[i + 1 :]], tools)
        before, found, after = probe.partition(STANDIN)
        start, end = len(before), len(full) - len(after)
        same = found and STANDIN not in after and start <= end and full.startswith(before) and full.endswith(after)
        if not same or full[start:end].strip() != content.strip():
            raise RowError("not provable", f"the chat template does not show where assistant message {i + 1} starts and ends")
        header = self.shape.header
        if i == 0 and self.shape.prompt and before.endswith(self.shape.prompt) and not before.endswith(header):
            header = ""  # nothing is asked yet, so a template that opens answers with a block of reasoning has none here
        if self.shape.prompt is None or not before.endswith(self.shape.prompt + header):
            raise RowError("not provable", f"assistant message {i + 1} does not follow the template's generation prompt")
        closing = self.shape.closing
        end += len(closing) if closing and full.startswith(closing, end) else 0
        return start - len(header), end

    def _marked_turns(
        self, messages: list[Message], tools: Any, full: str, spans: list[Span], wanted: list[int]
    ) -> list[Span] | None:
        """Spans that the template's markers give for the wanted turns; None where there are fewer than turns."""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) < len(turns):
            return None
        if len(spans) == len(turns):
            spans = [span for i, span in zip(turns, spans, strict=True) if i in wanted]
        elif wanted != turns:
            if not wanted:
                return []
            if wanted != turns[-len(wanted) :]:
                return None
            earlier = self.render(messages[: wanted[0]], tools).removesuffix(self.shape.ending)
            if not full.startswith(earlier):
                return None
            spans = [span for span in spans if span[0] >= len(earlier)]
        return [self._marked_span(full, start, end) for start, end in spans]

    def _marked_span(self, full: str, start: int, end: int) -> Span:
        """Leaves out what the generation prompt supplies, takes in an end-of-turn token that stands behind the marker."""
        prompt = self.shape.prompt or ""
        for at in range(max(0, start - len(prompt)), start + 1):
            if full.startswith(prompt, at):
                start = max(start, at + len(prompt))
                break
        closing = self.shape.closing
        if closing and full.startswith(closing, end) and not self._ends_turn(full[start:end]):
            end += len(closing)
        return start, end

    def _ends_turn(self, text: str) -> re.Match[str] | None:
        """The control token that only white space follows."""
        last = max(self._control.finditer(text), key=re.Match.end, default=None)
        return last if last and not text[last.end() :].strip() else None

    def _closed(self, full: str, start: int, end: int) -> Span:
        """Where answers have no end-of-turn token, the model stops by writing the next role's, so that one is trained."""
        shape = self.shape
        if shape.prompt is None or shape.closing is not None or shape.ending_closes or full.startswith(shape.prompt, end):
            return start, end
        found = self._control.match(full, end)
        if found is None or found.group() not in self._special:
            return start, end
        self.stop_tokens.add(found.group())
        return start, found.end()

    def _trimmed(self, full: str, start: int, end: int) -> Span:
        """Ends the turn at its end-of-turn token: a newline behind it is never generated."""
        found = self._ends_turn(full[start:end])
        if found is None:
            return start, end
        if found.group() in self._special or (self.shape.closing or "").endswith(found.group()):
            self.stop_tokens.add(found.group())
        return start, start + found.end()


def trainable(messages: Sequence[Message]) -> list[int]:
    """The assistant turns that no flag of the row leaves out."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and message.get("train", True)]


def _common_length(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _with_text_arguments(message: Message) -> Message:
    def text(call: Message) -> Message:
        arguments = call.get("arguments")
        return call if not isinstance(arguments, dict) else {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}

    if not message.get("tool_calls"):
        return message
    calls = [
        {**c, "function": text(c["function"])} if isinstance(c.get("function"), dict) else text(c) for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
