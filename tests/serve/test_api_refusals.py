"""What the server does not answer: each refusal is OpenAI's error object, says what to do, and tells no internals."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AuthenticationError

from outrider.serve.http import keys
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from serve.running import MODEL, Running, running
from serve.test_api import LONG, Slow

TEXT = {"prompt": "abc"}
CHAT = {"messages": [{"role": "user", "content": "abc"}]}


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    limits = {"n": 4, "texts": 6, "body_bytes": 200_000, "prompt_tokens": 200, "max_tokens": 100}
    with running(talker, hosts=("model.example",), **limits) as found:
        yield found


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, whose form is OpenAI's."""
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    message = body["error"]["message"]
    assert 10 < len(message) <= 600
    for secret in ("Traceback", "/outrider/", "site-packages", "pydantic", "0x7f"):
        assert secret not in message
    return body["error"]


def ask(server: Running, path: str, body: Any, client: Any = httpx) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return client.post(f"{server.url}{path}", content=content, headers=headers, timeout=30)


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", 101, "max_tokens must be at most 100"),
    ("max_tokens", "5", "must be a valid integer (given: '5')"),
    ("max_tokens", True, "max_tokens must be a valid integer"), ("n", 5, "n must be at most 4, got 5"),
    ("temperature", 2.5, "temperature must be 0 or a number from 0.01 to 2"),
    ("temperature", 1e-30, "temperature must be 0 or at least 0.01"),
    ("top_p", 0, "top_p must be greater than 0"), ("top_k", -2, "top_k must be"),
    ("logit_bias", {"a": 1}, "logit_bias must be an object"),
    ("logit_bias", {"999999": 1}, "outside the target's vocabulary"), ("logit_bias", {"1": 101}, "from -100 to 100"),
    ("stop", "", "stop must be a text"),
    ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'?"),
    ("mirostat", 2, "unknown field 'mirostat'; known: "), ("speculative", {"depth": 2}, "this server has no drafter"),
    ("timeout", 0, "timeout must be greater than 0"), ("echo", True, "echo is not supported"),
    ("suffix", "x", "suffix is not supported"), ("best_of", 3, "use n"), ("metadata", {"a": []}, "metadata"),
]  # fmt: skip
"""Of a completion, each by itself: its name, a value, and what is said of it."""
MALFORMED: dict[str, tuple[str, Any, str]] = {
    "no JSON": ("completions", b"{", "not JSON"),
    "a list": ("completions", [TEXT], "send one JSON object"),
    "null": ("completions", None, "send one JSON object"),
    "no UTF-8": ("completions", b'{"prompt": "\xff"}', "not JSON"),
    "half a surrogate": ("completions", b'{"prompt": "\\ud800"}', "not JSON"),
    "NaN": ("completions", b'{"prompt": "a", "temperature": NaN}', "not JSON"),
    "infinity": ("completions", b'{"prompt": "a", "temperature": 1e999}', "temperature must be 0 or a number"),
    "deep": ("chat/completions", b'{"messages": ' + b"[" * 50_000, "more than 40000 lists"),
    "deep schema": (
        "chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(150)}}},
        "",
    ),
    "a huge number": ("completions", b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}", "many digits"),
    "no prompt": ("completions", {}, "prompt is missing; add it"),
    "an empty prompt": ("completions", {"prompt": ""}, "the prompt is empty"),
    "no token ids": ("completions", {"prompt": [[]]}, "empty"),
    "no message": ("chat/completions", {"messages": []}, "messages must have at least 1 item"),
    "a prompt of numbers": ("completions", {"prompt": 5}, "prompt must be a text, token ids, or a list"),
    "true for a token": ("completions", {"prompt": [True]}, "prompt must be"),
    "tokens of another model": ("completions", {"prompt": [261]}, "outside the target's vocabulary of 261"),
    "too long": ("completions", {"prompt": "a" * 201}, "201 tokens, and this server accepts at most 200"),
    "no room": ("completions", {"prompt": "a" * 180, "max_tokens": 90}, "there is room for 76"),
    "many texts": ("completions", {"prompt": ["a"] * 4, "n": 2}, "8 texts, and a request may have at most 6"),
    "a large seed": ("completions", TEXT | {"seed": 2**63}, "seed must be less than"),
    "many stops": ("completions", TEXT | {"stop": ["a"] * 17}, "up to 16 texts"),
    "a long stop": ("completions", TEXT | {"stop": "a" * 257}, "1 to 256 characters"),
    "a fewest above the most": ("completions", TEXT | {"max_tokens": 3, "min_tokens": 4}, "the answer has at most 3"),
    "an unknown role": ("chat/completions", {"messages": [{"role": "usr", "content": "a"}]}, "'role' of 'system'"),
    "null for content": ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "a text, or a list"),
    "an unknown format": ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, "'type' of 'text'"),
    "a schema that is none": (
        "chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
        "JSON schema",
    ),
    "a large schema": (
        "chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "x" * 100_001}}}},
        "more than 100000",
    ),
    "a forced tool of none": ("chat/completions", CHAT | {"tool_choice": "required"}, "needs a tool of this request"),
    "a forced tool of others": (
        "chat/completions",
        CHAT
        | {"tool_choice": {"type": "function", "function": {"name": "b"}}}
        | {"tools": [{"type": "function", "function": {"name": "a"}}]},
        "which has a; add it to tools",
    ),
    "a choice of tools that is none": (
        "chat/completions", CHAT | {"tool_choice": "any"}, "none, auto, required, or a tool by its name",
    ),
    "ranks without": ("chat/completions", CHAT | {"top_logprobs": 3}, "add logprobs: true"),
    "a template": ("chat/completions", CHAT | {"chat_template": "{{ 1 }}"}, "only the tokenizer's own template"),
    "functions": ("chat/completions", CHAT | {"functions": [{"name": "a"}]}, "use tools"),
    "audio": ("chat/completions", CHAT | {"audio": {"voice": "a"}, "modalities": ["text", "audio"]}, "only text"),
}  # fmt: skip
MALFORMED |= {f"{name} {str(value)[:20]}": ("completions", TEXT | {name: value}, said) for name, value, said in FIELDS}


def test_a_malformed_body_is_a_400_that_says_why(server):
    """Catches a 500, a body that is taken after all and a stream that begins before its request was read."""
    with httpx.Client() as client:
        for name, (path, body, wanted) in MALFORMED.items():
            if isinstance(body, dict) and len(name) % 2:  # as many of one kind as of the other
                body = body | {"stream": True}
            answer = ask(server, f"/v1/{path}", body, client)
            if wanted:
                assert answer.status_code == 400, (name, answer.text)
                assert wanted in error_of(answer)["message"], name
            else:
                assert answer.status_code < 500, (name, answer.text)
    assert server.settled(lambda: server.engine.running == server.engine.queued == 0)


HARMLESS = {
    "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "best_of": 1, "echo": False, "suffix": None, "logit_bias": None, "stop": None, "n": None,
    "temperature": None, "include_stop_str_in_output": False, "skip_special_tokens": True, "use_beam_search": False,
    "stream_options": None, "length_penalty": 1.0, "max_tokens": 2.0,
}  # fmt: skip


def test_fields_that_change_nothing_are_taken(server):
    """Catches clients that are refused for what their library adds, and null where a field is left out."""
    answer = ask(server, "/v1/completions", TEXT | HARMLESS)
    assert answer.status_code == 200, answer.text
    chat = {"modalities": ["text"], "audio": None, "function_call": "auto", "functions": [], "tools": None}
    chat |= {"parallel_tool_calls": True, "response_format": {"type": "text"}, "tool_choice": "auto", "max_tokens": 2}
    answer = ask(server, "/v1/chat/completions", CHAT | chat)
    assert answer.status_code == 200, answer.text


def test_nothing_is_fetched_for_a_request(server):
    """Catches a server that reads URLs or files that a client names."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/x"
        for kind in ("image_url", "input_audio", "file", "video_url"):
            content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": url}}]
            answer = ask(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
            assert answer.status_code == 400
            assert "nothing is fetched" in error_of(answer)["message"]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": f"{url}.json"}}}
        assert ask(server, "/v1/chat/completions", CHAT | {"response_format": form}).status_code == 400
        with pytest.raises(TimeoutError):
            elsewhere.accept()


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    "{{ raise_exception('no such role') }}", "{{ messages[0]['content'] + 1 }}",
)  # fmt: skip


def test_a_chat_template_stays_in_its_sandbox(server, talker, monkeypatch):
    """Catches a tokenizer whose template runs code on the server, and a 500 where a template fails."""
    for template in ESCAPES:
        monkeypatch.setattr(talker.tokenizer, "chat_template", template)
        answer = ask(server, "/v1/chat/completions", CHAT)
        assert answer.status_code == 400, template
        assert "the model's chat template" in error_of(answer)["message"]
    assert ask(server, "/tokenize", CHAT).status_code == 400


def test_a_target_without_a_template_or_a_tokenizer_says_so(tmp_path, server, talker, monkeypatch):
    """Catches a 500 for a base model; the page looks for these words to try a completion instead."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", None)
    assert "no chat template" in error_of(ask(server, "/v1/chat/completions", CHAT))["message"]
    assert ask(server, "/v1/completions", TEXT | {"max_tokens": 2}).status_code == 200
    bare = load_target(talker.model)
    with running(bare) as found:
        for path, body in (
            ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}), ("/v1/completions", {"prompt": [1, 2], "stop": "a"}),
        ):  # fmt: skip
            assert ask(found, path, body).status_code == 400
        body = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
        answer = ask(found, "/v1/completions", body)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "")
        assert len(answer.json()["choices"][0]["token_ids"]) == 3


def test_tokens_of_nonsense_are_refused(server):
    """Catches a 500 of the tokenizer."""
    for path, body, wanted in (
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", {"messages": [], "prompt": "a"}, "unknown field 'prompt'"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "unknown model 'x'"),
        ("/detokenize", {"tokens": [5000]}, "outside the model's vocabulary; ids are 0 to 260"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0 must be"),
    ):
        answer = ask(server, path, body)
        assert answer.status_code in (400, 404)
        assert wanted in error_of(answer)["message"]


def test_a_body_that_is_too_large_is_413(server):
    """Catches memory that a client fills, also without saying beforehand how much it sends."""
    body = json.dumps(TEXT | {"user": "x" * 300_000}).encode()
    for content in (body, iter([body[:1000], body[1000:250_000], body[250_000:]])):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert "larger than 200000 bytes" in error_of(answer)["message"]


def test_a_body_must_say_that_it_is_json(server):
    """Catches a request that the page of another site can make a browser send without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        headers = {"content-type": kind} if kind else {}
        answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 415, kind
        assert "Content-Type: application/json" in error_of(answer)["message"]


def test_other_sites_are_not_let_in(server):
    """Catches an open CORS policy, a name of another site that leads to this machine, and one that can't be let in."""
    asks = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for path in ("/v1/completions", "/"):
        for answer in (
            httpx.options(f"{server.url}{path}", headers=asks | {"access-control-request-headers": "content-type"}),
            httpx.get(f"{server.url}{path}", headers=asks),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]
    for path in ("/v1/models", "/stats"):
        answer = httpx.get(f"{server.url}{path}", headers={"host": "evil.example:8000"})
        assert answer.status_code == 403
        assert "serve.hosts=evil.example" in error_of(answer)["message"]
    for name in (
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "api.localhost",
        "10.0.0.7",
        "model.example",
    ):
        assert httpx.get(f"{server.url}/v1/models", headers={"host": name}).status_code == 200, name


def test_paths_and_methods_that_there_are_not(server):
    """Catches a page of HTML where clients expect an error object, and a 405 without Allow."""
    for path in ("/v1/completion", "/v1", "/../etc/passwd", "/page.html"):
        answer = httpx.post(f"{server.url}{path}", json={})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_path")
    answer = httpx.post(f"{server.url}/v1/embeddings", json={})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unsupported_endpoint")
    answer = httpx.get(f"{server.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "it accepts POST" in error_of(answer)["message"]


def test_an_unexpected_failure_tells_nothing(server, monkeypatch):
    """Catches a stack, or the words of an exception, in an answer."""

    def fail(*given):
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(server.service.reader, "requests", fail)
    answer = ask(server, "/v1/completions", TEXT)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert error_of(answer)["code"] == "internal_error"


def test_a_socket_that_speaks_no_http_changes_nothing(server, caplog):
    """Catches a server that a port scan ends, and a log full of clients that went away before they had asked."""
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    half = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    half += b"content-length: 9\r\n\r\n{"
    for data in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", half[:60], half, b""):
        with socket.create_connection(address, timeout=5) as raw:
            raw.sendall(data)
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    assert httpx.get(server.url, headers=upgrade).status_code < 500
    assert ask(server, "/v1/completions", TEXT | {"max_tokens": 2}).status_code == 200
    assert server.settled(lambda: server.admission.num_active == 0)
    assert "ClientDisconnect" not in caplog.text


def test_with_keys_every_request_needs_one(talker, tmp_path):
    """Catches a route without a guard, a key that still works after it was revoked, and one that works before."""
    file = tmp_path / "keys.json"
    first = keys.add(file, "ann")
    with running(talker, keys=str(file), prefix_bytes=2**24) as found:
        url = f"{found.url}/v1/completions"
        for path in ("/v1/models", "/v1/models/tiny", "/nope"):
            assert httpx.get(f"{found.url}{path}").status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = ask(found, path, TEXT)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "Authorization: Bearer KEY" in error_of(answer)["message"]
        for path in ("/", "/health", "/ready", "/metrics", "/stats", "/openapi.json"):
            assert httpx.get(f"{found.url}{path}").status_code == 200
        document = httpx.get(f"{found.url}/openapi.json").json()
        assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
        for wrong in (f"Bearer {first}x", f"Basic {first}", first, "Bearer", "Bearer x", "Bearer \xe9"):
            answer = httpx.post(url, json=TEXT, headers={"authorization": wrong.encode("latin-1")})
            assert answer.status_code == 401, wrong
        with pytest.raises(AuthenticationError):
            found.client("outrider-nobody").completions.create(model=MODEL, prompt="a")
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        assert found.client(first).completions.create(**asked).choices
        second = keys.add(file, "bob")
        assert found.client(second).completions.create(**asked).choices
        usages = [
            found.client(key).completions.create(**asked | {"prompt": "ab" * 90}).usage
            for key in (first, first, second)
        ]
        cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
        assert cached[1] > 0 == cached[0] == cached[2], "one key's prompts are another's"
        keys.revoke(file, "ann")
        with pytest.raises(AuthenticationError):
            found.client(first).completions.create(**asked)
        assert found.client(second).completions.create(**asked).choices
        file.unlink()
        with pytest.raises(AuthenticationError):
            found.client(second).completions.create(**asked)


def test_a_key_has_so_many_requests_at_once(talker, tmp_path):
    """Catches one client that takes every slot, and a count that never goes down again."""
    file = tmp_path / "keys.json"
    headers = {"authorization": f"Bearer {keys.add(file, 'ann', 1)}"}
    other = {"authorization": f"Bearer {keys.add(file, 'bob')}"}
    with running(talker, Slow(), keys=str(file), concurrent=2) as found, httpx.Client(timeout=20) as client:
        url = f"{found.url}/v1/completions"
        with client.stream("POST", url, json=LONG | {"stream": True}, headers=headers) as first:
            lines = first.iter_lines()
            next(lines)
            answer = client.post(url, json=TEXT, headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert "this key has 1 requests running" in error_of(answer)["message"]
            assert client.post(url, json=TEXT | {"max_tokens": 1}, headers=other).status_code == 200
        assert found.settled(lambda: found.admission.num_active == 0)
        assert client.post(url, json=TEXT | {"max_tokens": 1}, headers=headers).status_code == 200


def test_the_documents_schemas_are_the_checks(server):
    """Catches a schema that is laxer or stricter than the server."""
    found = httpx.get(f"{server.url}/openapi.json").json()
    semantic = {
        "temperature 1e-30", "a fewest above the most", "logit_bias {'999999': 1}", "deep schema",
        "a large schema", "tokens of another model", "a schema that is none", "ranks without", "many texts", "no room",
        "too long", "speculative {'depth': 2}", "an empty prompt", "no token ids", "a forced tool of none",
        "a forced tool of others",
    }  # fmt: skip
    for name, (path, body, _) in MALFORMED.items():
        if not isinstance(body, dict) or name in semantic:
            continue
        which = "ChatRequest" if path.startswith("chat") else "CompletionRequest"
        schema = {"$ref": f"#/components/schemas/{which}", "components": found["components"]}
        assert not jsonschema.Draft202012Validator(schema).is_valid(body), name
