"""The server over real sockets, asked by OpenAI's own client: its texts are `generate`'s."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from torch import Tensor

from outrider import Sampling, generate, load_drafter
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.drafters.mix import Config as MixConfig
from outrider.drafters.mix import Mix
from outrider.drafters.mix import build as mix
from outrider.generation import Generation
from outrider.serve.bodies.answers import LOWEST
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.token_texts import Offsets, TokenTexts
from serve.running import MODEL, Running, running

PROMPT = "abcabcabcab"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abcabcabc"}]


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    drafter = load_drafter("ngram", talker)
    with running(talker, drafter, ("ngram",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def alone(target: TransformersTarget, prompt: Any, sampling: Sampling, count: int, **more: Any) -> Generation:
    """What `generate` writes."""
    return generate(target, [prompt], max_new_tokens=count, sampling=sampling, **more)[0]


def streamed(chunks: Any) -> tuple[str, str | None]:
    """Text and finish reason of a stream with one choice."""
    texts, reason = [], None
    for chunk in chunks:
        for choice in chunk.choices:
            texts.append(choice.text if hasattr(choice, "text") else choice.delta.content or "")
            assert reason is None, "a chunk after the last"
            reason = choice.finish_reason
    return "".join(texts), reason


SAMPLINGS = {
    "cut": (
        Sampling(1.2, 12, 0.9, 3, 0.02),
        {"temperature": 1.2, "top_p": 0.9, "seed": 3, "extra_body": {"top_k": 12, "min_p": 0.02}},
    ),
    "penalised": (
        Sampling(
            0.7, seed=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25,
            logit_bias={64: -5, 70: 3},
        ),
        {
            "temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "logit_bias": {"64": -5, "70": 3}, "extra_body": {"repetition_penalty": 1.3},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_completion_is_generates_text(name, client, talker):
    """Catches a setting that is lost or renamed on its way and a lost or doubled piece of a stream."""
    sampling, asked = SAMPLINGS[name]
    wanted = alone(talker, PROMPT, sampling, 24)
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24} | asked
    found = client.completions.create(**asked)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (wanted.text, wanted.finish_reason)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), len(wanted.tokens))
    assert streamed(client.completions.create(**asked, stream=True)) == (wanted.text, wanted.finish_reason)


def test_a_chat_goes_through_the_template(client, talker):
    """Catches messages that are joined in another way than the tokenizer's own, and a lost usage at a stream's end."""
    wanted = alone(talker, CHAT, Sampling(), 24)
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_completion_tokens": 24}
    found = client.chat.completions.create(**asked)
    assert (found.choices[0].message.content, found.choices[0].message.role) == (wanted.text, "assistant")
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == (wanted.text, "length")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for usage in (found.usage, chunks[-1].usage):
        assert usage.prompt_tokens == len(talker.encode(CHAT))
        assert usage.completion_tokens == len(wanted.tokens)


def test_parts_of_messages_and_developers_are_read(client, talker):
    """Catches a list of parts that a template of texts can't render, and OpenAI's newer word for system."""
    parts = [{"type": "text", "text": "abc"}, {"type": "text", "text": "abc"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc\nabc"}]
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    assert found.choices[0].message.content == alone(talker, plain, Sampling(), 8).text


def test_n_answers_have_seeds_of_their_own(client, talker):
    """Catches n equal answers, answers in the order in which they ended, and other settings lost with the seed."""
    prompts, own = ["abcab", "xyxyx"], {"n": 3, "max_tokens": 12, "temperature": 1.2, "top_p": 0.9, "seed": 11}
    more = {"top_k": 12, "min_p": 0.02}
    found = client.completions.create(model=MODEL, prompt=prompts, **own, extra_body=more)
    wanted = [alone(talker, one, Sampling(1.2, 12, 0.9, 11 + i, 0.02), 12).text for one in prompts for i in range(3)]
    assert [choice.text for choice in found.choices] == wanted
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage.prompt_tokens == 10


def test_a_stop_string_ends_the_text_before_itself(client, talker):
    """Catches a stop string that is given out piece by piece before it is complete, or taken for several."""
    text = alone(talker, PROMPT, Sampling(), 40).text
    for stop in ([text[9:12], text[20:22]], text[20:22]):
        wanted = alone(talker, PROMPT, Sampling(), 40, stop=[stop] if isinstance(stop, str) else stop)
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop}
        found = client.completions.create(**asked).choices[0]
        assert (found.text, found.finish_reason) == (wanted.text, "stop")
        assert streamed(client.completions.create(**asked, stream=True)) == (wanted.text, "stop")


def test_min_tokens_put_off_the_end(client, talker):
    """Catches an end token before min_tokens, and under ignore_eos any at all."""
    end = {str(talker.tokenizer.eos_token_id): 100.0}
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logit_bias": end}
    assert client.completions.create(**asked).usage.completion_tokens == 1
    found = client.completions.create(**asked, extra_body={"min_tokens": 5})
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (6, "stop")
    found = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (12, "length")


def test_log_probabilities_are_the_targets(client, talker):
    """Catches log probabilities of a drafted token that are the drafter's, a token out of place, and wrong offsets."""
    wanted = alone(talker, PROMPT, Sampling(0.9, seed=4, logprobs=3), 16)
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0.9, "seed": 4, "logprobs": 3}
    found = client.completions.create(**asked).choices[0].logprobs
    assert found.token_logprobs == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-9)
    texts = TokenTexts(talker.tokenizer)
    pieces = [texts.bytes_of(token) for token in wanted.tokens]
    assert found.tokens == [texts.name_of(token) for token in wanted.tokens]
    assert b"".join(pieces).decode(errors="replace") == wanted.text
    assert found.text_offset == Offsets().push(pieces)
    for own, one in zip(found.top_logprobs, wanted.logprobs, strict=True):
        assert own == pytest.approx({texts.name_of(token): value for token, value in (*one.top, one[:2])}, abs=1e-9)
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [value for part in parts for value in part.token_logprobs] == found.token_logprobs
    assert [at for part in parts for at in part.text_offset] == found.text_offset


def test_log_probabilities_of_a_chat_have_their_tokens(client, talker):
    """Catches the form of completions in a chat; a banned token has a number that JSON has."""
    wanted = alone(talker, CHAT, Sampling(logprobs=2), 8)
    found = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
    )
    content = found.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx([one.logprob for one in wanted.logprobs or ()], abs=1e-9)
    assert all(len(one.top_logprobs) == 2 and bytes(one.bytes).decode() == one.token for one in content)
    assert min(one.logprob for one in content) > LOWEST


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def test_an_answer_fits_its_schema(client, talker):
    """Catches a grammar that is left out, or that drafts go around."""
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    found = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=1.0, seed=1, max_tokens=90, response_format=form,
        logit_bias={str(token): -100 for token in talker.encode(" \t\r\n")},  # this target likes nothing better
    )  # fmt: skip
    value = json.loads(found.choices[0].message.content or "")
    assert found.choices[0].finish_reason == "stop"
    assert value.keys() == {"name", "count"} and len(value["name"]) <= 4 and value["count"] <= 99


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }}:{{ tools[0]['function']['parameters']['x'] }}|{% endif %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% if m.tool_calls %}({{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments['at'] }})"
    "{% endif %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
)


def test_tools_and_their_messages_go_through_the_template(server, client, talker, monkeypatch):
    """Catches tools that no template sees, arguments that stay text, and an answer that is not the model's text."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", TOOL_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"x": 5}}}]
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    ]
    wanted = "look:5|[False]user=hi;assistant=(look sky);tool=blue#c1;"
    more = {"tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    assert httpx.post(f"{server.url}/tokenize", json={"messages": messages} | more).json()["tokens"] == talker.encode(
        wanted
    )
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8, extra_body=more)
    assert found.choices[0].message.content == alone(talker, wanted, Sampling(), 8).text
    assert found.choices[0].finish_reason == "length"
    none = client.chat.completions.create(
        model=MODEL, messages=messages[:1], tools=tools, tool_choice="none", temperature=0, max_tokens=8
    )
    assert none.choices[0].message.content == alone(talker, "user=hi;", Sampling(), 8).text
    for name in ("messages", "unknown"):
        with pytest.raises(BadRequestError, match="not a variable of the model's chat template"):
            client.chat.completions.create(
                model=MODEL, messages=messages[:1], extra_body={"chat_template_kwargs": {name: True}}
            )


def test_drafted_tokens_are_told_when_asked_for(client, talker):
    """Catches flags that are not one a token, counts that contradict them, and pieces that are not the text."""
    wanted = alone(talker, CHAT, Sampling(), 48)
    predicted = {"type": "content", "content": wanted.text}
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 48, "prediction": predicted}
    assert client.chat.completions.create(**asked).model_extra == {}
    wrong = asked | {"prediction": {"type": "content", "content": "never written"}}
    assert client.chat.completions.create(**wrong).choices[0].message.content == wanted.text
    more = {"extra_body": {"include_drafts": True, "return_token_ids": True}}
    found = client.chat.completions.create(**asked, **more)
    drafts = found.model_extra["outrider"]
    less = client.chat.completions.create(**{name: asked[name] for name in asked if name != "prediction"}, **more)
    assert drafts["accepted"] > less.model_extra["outrider"]["accepted"]
    assert found.choices[0].model_extra["token_ids"] == wanted.tokens
    assert len(drafts["drafted_tokens"]) == len(wanted.tokens)
    assert sum(drafts["drafted_tokens"]) == drafts["accepted"] > 10
    assert drafts["steps"] + drafts["accepted"] == len(wanted.tokens) and drafts["drafted"] >= drafts["accepted"]
    assert "".join(text for text, _ in drafts["pieces"]) == wanted.text
    shown = [
        flag for token, flag in zip(wanted.tokens, drafts["drafted_tokens"], strict=True) if talker.decode([token])
    ]
    assert [flag for text, flag in drafts["pieces"] for _ in text] == shown, "a token of this target is a character"
    chunks = [c for c in client.chat.completions.create(**asked, **more, stream=True) if "outrider" in c.model_extra]
    own = [chunk.model_extra["outrider"] for chunk in chunks]
    assert [flag for one in own for flag in one["drafted_tokens"]] == drafts["drafted_tokens"]
    assert [t for c in chunks for t in c.choices[0].model_extra["token_ids"]] == wanted.tokens
    assert own[-1] | {"drafted_tokens": 0, "pieces": 0} == drafts | {"drafted_tokens": 0, "pieces": 0}
    assert "".join(text for one in own for text, _ in one["pieces"]) == wanted.text


def test_a_request_can_decode_plainly_or_draft_less(client, talker):
    """Catches a switch without effect, one that changes the text, and a depth that is not kept."""
    wanted = alone(talker, CHAT, Sampling(), 40)
    predicted = {"type": "content", "content": wanted.text}

    def drafts(speculative):
        found = client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=40, prediction=predicted,
            extra_body={"include_drafts": True, "speculative": speculative},
        )  # fmt: skip
        assert found.choices[0].message.content == wanted.text
        return found.model_extra["outrider"]

    plain, shallow, usual = drafts(False), drafts({"depth": 1}), drafts(True)
    assert (plain["drafted"], plain["steps"]) == (0, 40)
    assert 0 < shallow["drafted"] <= shallow["steps"]
    assert usual["steps"] < shallow["steps"] < 40
    assert drafts({"depth": 0})["drafted"] == 0


def test_a_request_can_choose_among_the_members_of_a_mix(talker):
    """Catches a name that no drafter hears, and one that is misspelt in silence."""
    drafter = mix(MixConfig(members=({"kind": "ngram"}, {"kind": "recycle"}), share="request"), talker)
    assert isinstance(drafter, Mix)
    heard = []
    choose = drafter._chosen
    drafter._chosen = lambda memory, state, row: (
        heard.append(state.requests[row].drafter),
        choose(memory, state, row),
    )[1]
    with running(talker, drafter, tuple(drafter.names)) as found:
        client = found.client()
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        client.completions.create(**asked, extra_body={"speculative": {"drafter": "recycle"}})
        assert heard == ["recycle"]
        with pytest.raises(BadRequestError, match="unknown drafter 'recicle'; did you mean 'recycle'"):
            client.completions.create(**asked, extra_body={"speculative": {"drafter": "recicle"}})


class Slow(Drafter):
    """Drafts nothing, and takes its time."""

    limit = 4

    def __init__(self, seconds: float = 0.02):
        self.seconds = seconds

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        time.sleep(self.seconds)
        return Draft.empty(len(state.rows), state.device)


class Broken(Drafter):
    limit = 4

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        raise RuntimeError("a secret of the drafter")


def test_a_drafter_that_raises_degrades_the_server_alone(talker):
    """Catches a request that fails with its drafter, and a health that stays ok."""
    with running(talker, Broken(), ("broken",)) as found:
        assert httpx.get(f"{found.url}/health").json() == {"status": "ok"}
        answer = found.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer.choices[0].text == alone(talker, PROMPT, Sampling(), 8).text
        health = httpx.get(f"{found.url}/health")
        assert (health.status_code, health.json()) == (200, {"status": "degraded"})


LONG = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def test_a_client_that_goes_away_frees_its_slots(talker):
    """Catches texts that are written for nobody, also those that still wait."""
    with running(talker, Slow(), slots=2) as found, httpx.Client() as client:
        for body in (LONG | {"stream": True, "n": 3}, LONG | {"n": 3}):
            if "stream" in body:
                with client.stream("POST", f"{found.url}/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    assert found.engine.running == 2
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{found.url}/v1/completions", json=body, timeout=0.3)
            assert found.settled(lambda: found.engine.running == found.engine.queued == 0, 2)
            assert found.settled(lambda: not found.service.jobs and found.admission.num_active == 0)


def test_a_deadline_is_408_wherever_it_passes(talker):
    """Catches a timeout that counts from a slot on, and one that a stream hides."""
    with running(talker, Slow(), slots=1) as found, httpx.Client(timeout=20) as client:
        url, body = f"{found.url}/v1/completions", LONG | {"timeout": 0.3}
        answer = client.post(url, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        answer = client.post(url, json=body | {"stream": True})
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert (events[-1], json.loads(events[-2])["error"]["code"]) == ("[DONE]", "timeout")
        assert len(events) > 4
        with client.stream("POST", url, json=LONG | {"stream": True}) as busy:
            lines = busy.iter_lines()
            next(lines)  # one that nobody refers to any more closes the connection
            for stream in (False, True):
                answer = client.post(url, json=body | {"stream": stream})
                assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


def test_a_full_queue_is_429_with_a_time_to_wait(talker):
    """Catches a queue without end, and n answers of which some stay in it."""
    with running(talker, Slow(), slots=1, queue=2) as found, httpx.Client(timeout=20) as client:
        url = f"{found.url}/v1/completions"
        with client.stream("POST", url, json=LONG | {"stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            full = client.post(url, json=LONG | {"n": 3})
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert 1 <= int(full.headers["retry-after"]) <= 60
            assert found.settled(lambda: found.engine.queued == 0)


def test_a_text_that_can_not_go_on_is_the_clients_error(server):
    """Catches a 500 where a request's own settings leave no token possible."""
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a"}}}
    body = LONG | {"response_format": form, "max_tokens": 20}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    assert "leave no token possible" in answer.json()["error"]["message"]


def test_tokens_and_texts_go_both_ways(server, talker):
    """Catches special tokens that are lost, and ids that are not the target's."""
    text = "a<|end|>b é"
    found = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert found == {"tokens": talker.encode(text), "count": len(talker.encode(text)), "max_model_len": 256}
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": text}
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == talker.encode(CHAT)


def test_the_model_has_one_name(server, client):
    """Catches a server that answers for any model, and a list without it."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    for answer in (
        httpx.get(f"{server.url}/v1/models/tinny"),
        httpx.post(f"{server.url}/v1/completions", json={"model": "tinny", "prompt": "a"}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "did you mean 'tiny'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["text", "ids"])
def test_pieces_of_an_interval_come_together(more, talker):
    """Catches text that is lost, doubled or given to another choice where several steps are sent as one."""
    with running(talker, interval_s=60) as found:
        chunks = [*found.client().completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, n=2, seed=4, stream=True, extra_body=more
        )]  # fmt: skip
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        wanted = alone(talker, PROMPT, Sampling(1.0, seed=4 + index), 12)
        assert "".join(choice.text for choice in own) == wanted.text
        assert len(own) <= 4 if not more else len(own) == 12
        if "return_token_ids" in more:
            assert [token for choice in own for token in choice.token_ids] == wanted.tokens


def test_defaults_are_those_of_the_generation_config(talker, monkeypatch):
    """Catches a model that is served at another temperature than its makers say."""
    config = talker.model.generation_config
    monkeypatch.setattr(config, "temperature", 0.6)
    monkeypatch.setattr(config, "top_k", 9)
    with running(talker) as found:
        answer = found.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, seed=3)
        assert answer.choices[0].text == alone(talker, PROMPT, Sampling(0.6, 9, seed=3), 24).text
