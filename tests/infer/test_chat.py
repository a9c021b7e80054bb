"""A talk: history, commands, ways to end it, and what is printed."""

import io
import json
from collections.abc import Iterator

import pytest

from swiftlite.infer import chat as chatting
from swiftlite.infer.load import Target, load_target
from tests.infer.making import chat, ids_of, save_taught


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_taught(tmp_path_factory.mktemp("taught"))))


def talk(target: Target, *lines: str | type[BaseException], **options: object) -> str:
    """What is said to these lines; a class stands for an exception raised while the line is awaited."""
    left: Iterator[str | type[BaseException]] = iter(lines)
    said: list[str] = []

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    chatting.chat(target, read=read, write=said.append, **{"max_new_tokens": 12, **options})
    assert next(left, None) is None, "the talk ended too early"
    return "".join(said)


def traced(output: str) -> list[list[int]]:
    return [json.loads(line.removeprefix("prompt ids: ")) for line in output.splitlines() if line.startswith("prompt ids: ")]


def test_each_line_is_answered_with_what_was_said_before(taught: Target):
    out = talk(taught, "hi", "", "  ", "bye", "/reset", "1+1", trace=True)
    prompts = traced(out)
    answered = [line for line in out.splitlines() if not line.startswith("prompt ids: ")]
    assert answered[0] == "yo"
    render = taught.renderer.prompt
    assert prompts == [render(chat("hi")), render(chat("hi", answered[0], "bye")), render(chat("1+1"))]
    assert answered[2] == "2"


@pytest.mark.parametrize("end", ["/exit", EOFError, KeyboardInterrupt])
def test_ways_to_end(taught: Target, end: str | type[BaseException]):
    assert talk(taught, "hi", end) == "yo\n"


def test_a_system_prompt_stands_in_front(taught: Target):
    (ids,) = traced(talk(taught, "hi", system="Be brief.", trace=True))
    assert ids == taught.renderer.prompt([{"role": "system", "content": "Be brief."}, *chat("hi")])


def test_raw_lines_stand_alone(taught: Target):
    assert traced(talk(taught, "hi", "bye", raw=True, trace=True)) == [ids_of("hi"), ids_of("bye")]


def test_a_line_that_does_not_fit_is_refused_and_forgotten(taught: Target):
    out = talk(taught, "x" * 300, "hi", trace=True)
    assert "256" in out
    assert traced(out) == [taught.renderer.prompt(chat("hi"))]


def test_ctrl_c_stops_an_answer_and_not_the_talk(taught: Target, monkeypatch: pytest.MonkeyPatch):
    real, closed = chatting.stream_ids, []

    def interrupted(*args: object) -> Iterator[str]:
        pieces = real(*args)
        try:
            yield next(pieces)
            if not closed:
                raise KeyboardInterrupt
            yield from pieces
        finally:
            pieces.close()
            closed.append(True)

    monkeypatch.setattr(chatting, "stream_ids", interrupted)
    out = talk(taught, "hi", "hi", trace=True)
    assert "y [stopped]\n" in out
    assert traced(out)[1] == taught.renderer.prompt(chat("hi", "y", "hi"))


def test_lines_from_a_pipe(taught: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\n1+1"))
    chatting.chat(taught, max_new_tokens=12)
    out, err = capsys.readouterr()
    assert out == "yo\n2\n", "answers and nothing else"
    assert taught.description in err
