"""What each client library does with a server, by its own names: python client_programs.py LIBRARY URL MODEL.

Run by the Python that has the library; every check is an assertion.  The model writes what it likes: only forms, forced
tools, schemas, counts and errors are checked.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

ASK = [{"role": "user", "content": "Name a colour."}]


class Paint(BaseModel):
    """Paint a wall."""

    colour: Literal["red", "blue"]
    coats: Literal[1, 2, 3]


TOOL = {"type": "function", "function": {"name": "Paint", "parameters": Paint.model_json_schema()}}
CHOICE = {"type": "function", "function": {"name": "Paint"}}


def openai(url: str, model: str) -> None:
    from openai import BadRequestError, NotFoundError, OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    assert model in [one.id for one in client.models.list()]
    greedy = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**greedy, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 8
    assert "".join(one.token for one in whole.choices[0].logprobs.content).startswith(whole.choices[0].message.content)
    chunks = list(client.chat.completions.create(**greedy, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (streamed, chunks[-1].usage) == (whole.choices[0].message.content, whole.usage)
    with client.chat.completions.stream(model=model, messages=ASK, tools=[TOOL], tool_choice=CHOICE) as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    Paint.model_validate_json(call.function.arguments)
    parsed = client.chat.completions.parse(model=model, messages=ASK, response_format=Paint)
    assert isinstance(parsed.choices[0].message.parsed, Paint)
    fails(NotFoundError, lambda: client.chat.completions.create(model="none", messages=ASK))
    fails(BadRequestError, lambda: client.chat.completions.create(**greedy | {"temperature": 9}))
    fails(NotFoundError, lambda: client.embeddings.create(model=model, input="a"))


def litellm(url: str, model: str) -> None:
    import litellm

    common = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": ASK, "num_retries": 0}
    greedy = common | {"temperature": 0, "max_tokens": 8}
    whole = litellm.completion(**greedy, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 8
    assert whole.choices[0].logprobs.content
    chunks = litellm.completion(**greedy, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    forced = litellm.completion(**common, tools=[TOOL], tool_choice=CHOICE)
    Paint.model_validate_json(forced.choices[0].message.tool_calls[0].function.arguments)
    chunks = list(litellm.completion(**common, tools=[TOOL], tool_choice=CHOICE, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    Paint.model_validate_json(built.choices[0].message.tool_calls[0].function.arguments)
    Paint.model_validate_json(litellm.completion(**common, response_format=Paint).choices[0].message.content)
    fails(litellm.NotFoundError, lambda: litellm.completion(**common | {"model": "openai/none"}))
    fails(litellm.BadRequestError, lambda: litellm.completion(**common, temperature=9))


def langchain_openai(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI
    from openai import NotFoundError

    def chat(**more):
        return ChatOpenAI(**{"base_url": url, "api_key": "none", "model": model, "max_retries": 0} | more)

    greedy = chat(temperature=0, max_tokens=8, logprobs=True)
    whole = greedy.invoke("Name a colour.")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 8 and whole.response_metadata["logprobs"]
    assert "".join(chunk.content for chunk in greedy.stream("Name a colour.")) == whole.content
    tools = chat().bind_tools([Paint], tool_choice="Paint")
    [call] = tools.invoke("Paint it.").tool_calls
    Paint.model_validate(call["args"])
    merged = None
    for chunk in tools.stream("Paint it."):
        merged = chunk if merged is None else merged + chunk
    Paint.model_validate(merged.tool_calls[0]["args"])
    assert isinstance(chat().with_structured_output(Paint).invoke("Paint it."), Paint)
    assert isinstance(chat().with_structured_output(Paint, method="function_calling").invoke("Paint it."), Paint)
    fails(NotFoundError, lambda: chat(model="none").invoke("a"))


def llm(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model_id": "here", "model_name": model, "api_base": url, "api_key_name": "none"}
        settings |= {"supports_schema": True, "supports_tools": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([settings]))  # JSON is YAML
        os.environ["LLM_USER_PATH"] = folder
        import llm

        here = llm.get_model("here")
        greedy = {"temperature": 0, "max_tokens": 8, "key": "none"}
        whole = here.prompt("Name a colour.", stream=False, **greedy)
        assert whole.text() and whole.usage().output <= 8
        streamed = here.prompt("Name a colour.", stream=True, **greedy)
        assert "".join(streamed) == whole.text() and streamed.usage().output == whole.usage().output
        Paint.model_validate_json(here.prompt("Paint it.", schema=Paint, key="none").text())

        def paint(colour: str) -> str:
            """Paint a wall."""
            return colour

        here.prompt("Paint it.", tools=[paint], stream=True, max_tokens=8, key="none").tool_calls()
        talk = here.conversation()
        assert talk.prompt("Name a colour.", **greedy).text() and talk.prompt("Another.", **greedy).text()
        fails(Exception, lambda: here.prompt("a", temperature=1.9, top_p=7, key="none").text())


def instructor(url: str, model: str) -> None:
    import instructor
    from openai import OpenAI

    plain = OpenAI(base_url=url, api_key="none", max_retries=0)
    request = {"model": model, "messages": ASK, "response_model": Paint, "max_retries": 1}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        paint, raw = client.chat.completions.create_with_completion(**request)
        assert isinstance(paint, Paint) and raw.usage.completion_tokens
        *_, last = client.chat.completions.create_partial(**request)
        assert last.colour in ("red", "blue")
    fails(Exception, lambda: client.chat.completions.create(**request | {"model": "none"}))


def pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    here = OpenAIChatModel(model, provider=provider)
    greedy = {"temperature": 0.0, "max_tokens": 8}
    whole = Agent(here, model_settings=greedy | {"openai_logprobs": True}).run_sync("Name a colour.")
    assert whole.output and whole.usage.output_tokens <= 8
    for kind in (Paint, NativeOutput(Paint)):
        assert isinstance(Agent(here, output_type=kind).run_sync("Paint it.").output, Paint)
    streamed = Agent(here, model_settings=greedy).run_stream_sync("Name a colour.")
    assert "".join(streamed.stream_text(delta=True)) == whole.output
    fails(ModelHTTPError, lambda: Agent(OpenAIChatModel("none", provider=provider)).run_sync("a"))


def fails(kind: type[Exception], call) -> None:
    """The call raises an error of this kind, with a message."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        message = ""
    assert message, f"no {kind.__name__} with a message"


if __name__ == "__main__":
    library, url, model = sys.argv[1:]
    globals()[library](url, model)
