"""LangChain's ChatOpenAI against a server: an answer, a stream, tools, structured output, log-probabilities.

Runs in the environment of the clients: ``langchain_chat.py URL MODEL``. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is 7 degrees in {city}."


def main() -> None:
    url, model = sys.argv[1:]
    chat = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=64, max_retries=0, timeout=120
    )
    messages = [SystemMessage("Answer in one short sentence."), HumanMessage("What is the capital of France?")]
    answer = chat.invoke(messages)
    pieces = list(chat.stream(messages, stream_usage=True))
    batch = chat.batch([messages, [HumanMessage("Say hello.")]])
    person = chat.with_structured_output(Person, method="json_schema").invoke("Ada is 36 years old.")
    forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
    call = forced.tool_calls[0]
    told = chat.bind_tools([get_weather]).invoke(
        [
            HumanMessage("Weather in Paris?"),
            forced,
            ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]),
        ]
    )
    scored = chat.bind(logprobs=True, top_logprobs=3).invoke(messages)
    assert isinstance(person, Person)
    assert isinstance(told, AIMessage)
    print(
        json.dumps(
            {
                "answer": answer.text,
                "streamed": "".join(piece.text for piece in pieces),
                "stream_usage": sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces),
                "usage": answer.usage_metadata["output_tokens"],
                "batch": [each.text for each in batch],
                "person": person.model_dump(),
                "tool_call": {"name": call["name"], "args": call["args"]},
                "finish_reason": forced.response_metadata["finish_reason"],
                "num_logprobs": len(scored.response_metadata["logprobs"]["content"]),
            }
        )
    )


if __name__ == "__main__":
    main()
