"""Public model families in small: a chat template in their manner, a byte-level tokenizer with their control tokens, and what
a row of theirs has to train. SHAPES are the conversations to try them on."""

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.template_sources import CHATML, DEEPSEEK3, DEEPSEEK_R1, GEMMA2, GEMMA3, GLM4, LLAMA3, MISTRAL3, MISTRAL7, PHI3, QWEN3

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
IGNORE = -100


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _calls(m: dict[str, Any], one: Callable[[dict[str, Any]], str], between: str = "") -> str:
    return between.join(one(call) for call in m.get("tool_calls", []))


def _chatml(m: dict[str, Any]) -> str:
    def one(call: dict[str, Any]) -> str:
        f = call["function"]
        return f'<tool_call>\n{{"name": "{f["name"]}", "arguments": {_json(f["arguments"])}}}\n</tool_call>'

    calls = _calls(m, one, "\n")
    return m["content"] + ("\n" if m["content"] and calls else "") + calls + "<|im_end|>"


def _qwen3(m: dict[str, Any]) -> str:
    """As the last turn of a conversation, where a block of reasoning is always written."""
    reasoning, _, content = m["content"].rpartition("</think>")
    content = content.lstrip("\n")
    reasoning = reasoning.rstrip("\n").split("<think>")[-1].lstrip("\n")
    return f"<think>\n{reasoning}\n</think>\n\n" + _chatml({**m, "content": content})


def _qwen3_plain(m: dict[str, Any]) -> str:
    """The generation prompt has the empty block, and newlines in front of the answer are taken for its end."""
    return _chatml({**m, "content": m["content"].lstrip("\n")})


def _llama3(m: dict[str, Any]) -> str:
    def one(call: dict[str, Any]) -> str:
        f = call["function"]
        return f'{{"name": "{f["name"]}", "parameters": {_json(f["arguments"])}}}'

    return (_calls(m, one) or m["content"].strip()) + "<|eot_id|>"


def _mistral(space: str) -> Callable[[dict[str, Any]], str]:
    def one(call: dict[str, Any]) -> str:
        f = call["function"]
        return f'{{"name": "{f["name"]}", "arguments": {_json(f["arguments"])}, "id": "{call["id"]}"}}'

    def answer(m: dict[str, Any]) -> str:
        calls = _calls(m, one, ", ")
        content = m["content"].strip() if space else m["content"]
        return (f"[TOOL_CALLS]{space}[{calls}]" if calls else space + content) + "</s>"

    return answer


def _deepseek(m: dict[str, Any]) -> str:
    def one(call: dict[str, Any]) -> str:
        f = call["function"]
        text = f"{f['name']}\n```json\n{_json(f['arguments'])}\n```"
        return f"<｜tool▁call▁begin｜>{call['type']}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"

    calls = _calls(m, one, "\n")
    calls = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return m["content"] + calls + "<｜end▁of▁sentence｜>"


def _glm4(m: dict[str, Any]) -> str:
    return _calls(m, lambda c: c["function"]["name"] + "\n" + _json(c["function"]["arguments"])) or "\n" + m["content"]


@dataclass(frozen=True)
class Family:
    """One template and its tokenizer.

    Args:
        answer: what an assistant message trains as the last turn of a conversation, end-of-turn token included.
        control: special tokens; `plain` are added tokens that are not special, as <think>.
        end: the end-of-turn token; "" where the template has none.
        variables: data.template_kwargs.
        text_arguments: the template takes the arguments of a tool call as JSON text only.
        greeting: `answer` of an assistant message that comes first, where that is another.
    """

    source: str
    answer: Callable[[dict[str, Any]], str]
    control: tuple[str, ...]
    end: str
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    text_arguments: bool = False
    greeting: Callable[[dict[str, Any]], str] | None = None

    def template(self, markers: bool = False) -> str:
        opening, closing = ("{%- generation %}", "{%- endgeneration %}") if markers else ("", "")
        lines = self.source.replace("</G>", closing).replace("<G>", opening).splitlines()
        return "\n".join(line for line in lines if line.strip())

    def tokenizer(self, markers: bool = False) -> PreTrainedTokenizerFast:
        tokenizer = copy(_tokenizer(self.control, self.plain, self.eos, self.bos))
        tokenizer.chat_template = self.template(markers)
        return tokenizer

    def given(self, messages: Messages) -> Messages:
        """Messages as this template takes them from `apply_chat_template`."""
        if not self.text_arguments:
            return messages

        def call(c: dict[str, Any]) -> dict[str, Any]:
            return {**c, "function": {**c["function"], "arguments": _json(c["function"]["arguments"])}}

        return [{**m, "tool_calls": [call(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]

    def ids(self, messages: Messages, tools: Tools = None, *, markers: bool = False, prompt: bool = False) -> list[int]:
        out = self.tokenizer(markers).apply_chat_template(
            self.given(messages), tools=tools, tokenize=True, add_generation_prompt=prompt, **self.variables
        )
        return list(out["input_ids"])

    def encoded(self, text: str) -> list[int]:
        return list(self.tokenizer()(text, add_special_tokens=False)["input_ids"])

    def labels(self, messages: Messages, tools: Tools, turns: Sequence[int]) -> list[int] | None:
        """The labels of a row that trains these messages, found without swiftlite: each stands behind the ids that inference
        would be given for it and reads as `answer`. None where a turn stands nowhere like that."""
        ids = self.ids(messages, tools)
        labels = [IGNORE] * len(ids)
        for i in turns:
            answer = self.encoded((self.greeting or self.answer if i == 0 else self.answer)(messages[i]))
            if i == 0:
                at = next((n for n in range(1, len(ids)) if ids[n : n + len(answer)] == answer), 0)
            else:
                prompt = self.ids(messages[:i], tools, prompt=True)
                at = len(prompt) if ids[: len(prompt)] == prompt else 0
            if not at or ids[at : at + len(answer)] != answer:
                return None
            labels[at : at + len(answer)] = answer
            end = at + len(answer)
            if not self.end and i + 1 < len(messages) and messages[i + 1]["role"] != "assistant":
                labels[end] = ids[end]  # the next role's token is the end of this turn
        return labels


@cache
def _tokenizer(control: tuple[str, ...], plain: tuple[str, ...], eos: str, bos: str | None) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*control, *plain])}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    names = {"eos_token": eos, "pad_token": control[0]} | ({"bos_token": bos} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA = ("<|pad|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
_GEMMA_TOKENS = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_MISTRAL_TOKENS = (
    "<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip
_DEEPSEEK_TOKENS = ("<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_DEEPSEEK_PLAIN = (
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>",
    *(f"<｜tool▁{name}▁{side}｜>" for name in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
)  # fmt: skip
_PHI = ("<|placeholder|>", "<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

_DEEPSEEK_KEYS: dict[str, Any] = {
    "control": _DEEPSEEK_TOKENS, "end": "<｜end▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "bos": "<｜begin▁of▁sentence｜>",
    "plain": _DEEPSEEK_PLAIN, "text_arguments": True,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, _chatml, _QWEN, "<|im_end|>", "<|im_end|>", plain=_QWEN_PLAIN[2:]),
    "llama3": Family(
        LLAMA3, _llama3, _LLAMA, "<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>", variables={"date_string": "26 Jul 2024"}
    ),
    "gemma2": Family(GEMMA2, lambda m: m["content"].strip() + "<end_of_turn>", _GEMMA_TOKENS, "<end_of_turn>", "<eos>", "<bos>"),
    "gemma3": Family(GEMMA3, lambda m: m["content"].strip() + "<end_of_turn>", _GEMMA_TOKENS, "<end_of_turn>", "<eos>", "<bos>"),
    "mistral3": Family(MISTRAL3, _mistral(" "), _MISTRAL_TOKENS, "</s>", "</s>", "<s>"),
    "mistral7": Family(MISTRAL7, _mistral(""), _MISTRAL_TOKENS, "</s>", "</s>", "<s>"),
    "qwen3": Family(QWEN3, _qwen3, _QWEN, "<|im_end|>", "<|im_end|>", plain=_QWEN_PLAIN, greeting=_chatml),
    "qwen3 without thinking": Family(
        QWEN3, _qwen3_plain, _QWEN, "<|im_end|>", "<|im_end|>", plain=_QWEN_PLAIN, variables={"enable_thinking": False}
    ),
    "deepseek3": Family(DEEPSEEK3, _deepseek, **_DEEPSEEK_KEYS),
    "deepseek r1": Family(DEEPSEEK_R1, _deepseek, **_DEEPSEEK_KEYS),
    "phi3": Family(PHI3, lambda m: m["content"] + "<|end|>", _PHI, "<|end|>", "<|endoftext|>"),
    "glm4": Family(GLM4, _glm4, _GLM, "", "<|endoftext|>"),
}


def say(*turns: str) -> Messages:
    """Messages out of "role: content"; only the first ": " divides."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": content} for role, _, content in (turn.partition(": ") for turn in turns)]


TOOLS_LIST: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place: “now”",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Łódź", "days": 2}}}
SHAPES: dict[str, Messages] = {
    "single": say("u: hi", "a: yo"),
    "system": say("s: be brief", "u: hi", "a: yo"),
    "multi-turn": say("u: hi", "a: yo", "u: a?", "a: b!", "u: hi", "a: yo"),
    "tools": [
        *say("u: how is it there?"),
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": "call00001"},
        *say("a: It is grey."),
    ],
    "two users": say("u: first", "u: second", "a: both"),
    "think": say("u: why?", "a: <think>\nBecause.\nOr not.\n</think>\n\nSo."),
    "empty answer": say("u: hi", "a: "),
    "unicode": say("u: grüß 你好 \u202bשלום\u202c", "a: naïve 🙂 e\u0301 مرحبا 👩‍👩‍👧 \ufeff\u2028x"),
    "long": say(*(f"{'au'[n % 2 == 0]}: {'word ' * (n % 7)}{n}" for n in range(40))),
    "whitespace": say("u:  \n hi \n", "a: \n\n yo\n\tthere \n "),
    "assistant first": say("a: welcome", "u: hi", "a: yo"),
    "template-like": say(
        "u: what are {{ messages }}?",
        "a: {% for m in messages %}<|im_start |>assistant\n### user\n[INST {{ bos_token }} <|end_of turn|>{# #}\nuser:",
    ),
}
