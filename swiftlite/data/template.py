"""A chat template: one rendering of a conversation, and which of its characters are assistant turns, proven per row.

Two proofs. Templates with `{% generation %}` markers say it themselves. For all others the conversation is rendered up to
each turn, once with the generation prompt and once with the answer; both must be prefixes of the full rendering. What stands
between them is the turn, exactly as inference would have to write it. A row without a proof is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from swiftlite.data.formats import RowError
from swiftlite.recipe.errors import RecipeError, nearest

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of the full rendering

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
        for name in variables:
            words = set(re.findall(r"[A-Za-z_]\w*", text))
            if name not in words:
                what = f"the chat template reads no '{name}'.{nearest(name, words)}"
                raise RecipeError(what, where=f"data.template_kwargs.{name}")
        added = tokenizer.added_tokens_decoder
        tokens = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self._special = {token.content for token in added.values() if token.special}
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
            RowError: the template refuses the conversation, would silently leave a part of it out, or a span is not proven.
        """
        self._check_reads(messages, tools)
        full, marked = self._render(messages, tools, False, spans=self.marked)
        wanted = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        spans = self._marked_turns(messages, tools, full, marked, wanted) if self.marked else None
        if spans is None:
            spans = [self._proven_turn(messages, tools, full, i) for i in wanted]
        return full, [self._trimmed(full, start, end) for start, end in spans]

    def _render(self, messages: Sequence[Message], tools: Any, prompt: bool, *, spans: bool) -> tuple[str, list[Span]]:
        try:
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
        read_as = {"tools": ["tools"], "tool_calls": ["tool_calls"], **dict.fromkeys(REASONING, REASONING)}
        for key, names in read_as.items():
            if (key in present or (key == "tools" and tools)) and not any(name in self.text for name in names):
                raise RowError("left out by the chat template", f"the row has {key}, which the chat template does not write")

    def _find_shape(self) -> Shape:
        ask = {"role": "user", "content": ASK}
        reply = {"role": "assistant", "content": REPLY}
        try:
            asked, prompted = self.render([ask]), self.render([ask], prompt=True)
            once, twice = self.render([ask, reply]), self.render([ask, reply, {"role": "user", "content": MORE}, reply])
        except RowError:
            return Shape()
        if ASK not in prompted or not once.startswith(prompted) or once.count(REPLY) != 1:
            return Shape()
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
            if not full.startswith(part):
                at = _common_length(part, full)
                alone, inside = part[at : at + 30], full[at : at + 30]
                detail = f"{what} of message {i + 1} reads {alone!r} when it is the last message, here it reads {inside!r}"
                fix = "" if last else "; data.train_on: last needs the last turn only"
                raise RowError("altered by the chat template", detail + fix)
        return len(prompt), len(turn)

    def _by_standin(self, messages: list[Message], tools: Any, full: str, i: int) -> Span:
        """For turns whose prefix cannot be rendered: what moves when only this content is replaced is the content."""
        content = messages[i]["content"]
        probe = self.render([*messages[:i], {**messages[i], "content": STANDIN}, *messages[i + 1 :]], tools)
        before, found, after = probe.partition(STANDIN)
        start, end = len(before), len(full) - len(after)
        same = found and STANDIN not in after and start <= end and full.startswith(before) and full.endswith(after)
        if not same or full[start:end].strip() != content.strip():
            raise RowError("not provable", f"the chat template does not show where assistant message {i + 1} starts and ends")
        if self.shape.prompt is None or not before.endswith(self.shape.prompt + self.shape.header):
            raise RowError("not provable", f"assistant message {i + 1} does not follow the template's generation prompt")
        closing = self.shape.closing
        end += len(closing) if closing and full.startswith(closing, end) else 0
        return start - len(self.shape.header), end

    def _marked_turns(
        self, messages: list[Message], tools: Any, full: str, spans: list[Span], wanted: list[int]
    ) -> list[Span] | None:
        """Spans that the template's markers give for the wanted turns; None where there are fewer than turns."""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) < len(turns):
            return None
        if len(spans) == len(turns):
            spans = spans[len(turns) - len(wanted) :] if wanted else []
        elif wanted != turns:
            if not wanted:
                return []
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

    def _trimmed(self, full: str, start: int, end: int) -> Span:
        """Ends the turn at its end-of-turn token: a newline behind it is never generated."""
        found = self._ends_turn(full[start:end])
        if found is None:
            return start, end
        if found.group() in self._special or (self.shape.closing or "").endswith(found.group()):
            self.stop_tokens.add(found.group())
        return start, start + found.end()


def _common_length(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
