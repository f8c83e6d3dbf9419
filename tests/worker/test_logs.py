"""One line for each event, for people or for programs; what the process is and what an event is about are on it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from octavo.worker.logs import LogFormat, configure_logs
from octavo.worker.messages import FinishReason, Request, SamplingParams, SequenceUpdate
from octavo.worker.request_log import log_failed, log_received, trace_id

WHO = {"role": "worker", "group": "group-1", "rank": 0}
NAME = "octavo.tests.logs"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    yield io.StringIO()
    for name in (NAME, "octavo.worker.request_log"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def log(stream: io.StringIO, form: LogFormat, level: str = "info", name: str = NAME) -> logging.Logger:
    configure_logs(level, form, WHO, logger=name, stream=stream)
    return logging.getLogger(name)


def test_json_is_an_object_on_one_line_whatever_is_said(stream: io.StringIO) -> None:
    logger = log(stream, "json")
    try:
        raise ValueError('of two\nlines, "quoted"')
    except ValueError:
        logger.exception("what %s\nhappened", "has", extra={"fields": {"request_id": "r", "left_out": None}})
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert "Traceback" in told.pop("exception")
    assert told == {"level": "error", "logger": NAME, "message": "what has\nhappened", **WHO, "request_id": "r"}


def test_text_has_fields_behind_the_message(stream: io.StringIO) -> None:
    fields = {"id": "cmpl-1", "ttft_s": 0.123456789, "why": 'say "no"', "none": None}
    log(stream, "text").warning("slow", extra={"fields": fields})
    _, rest = stream.getvalue().rstrip("\n").split(" ", 1)
    assert rest == f'WARNING {NAME} [worker/group-1/0] slow id=cmpl-1 ttft_s=0.123457 why="say \\"no\\""'


def test_the_level_holds_and_setting_up_again_does_not_repeat_lines(stream: io.StringIO) -> None:
    log(stream, "text", "warning")
    logger = log(stream, "text", "warning")
    logger.info("no")
    logger.warning("yes")
    assert stream.getvalue().count("\n") == 1


def a_request() -> Request:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    params = SamplingParams(max_tokens=2, seed=0)
    return Request("cmpl-1-0", "g", "m", (5, 6, 7), b"", params, trace=trace, client_request_id="mine")


def test_a_group_tells_which_trace_a_request_belongs_to_when_it_is_asked_for_details(stream: io.StringIO) -> None:
    log(stream, "json", "debug", "octavo.worker.request_log")
    log_received(a_request())
    told = json.loads(stream.getvalue())
    assert told["trace_id"] == trace_id(a_request().trace) == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (told["request_id"], told["client_request_id"], told["prompt_tokens"]) == ("cmpl-1-0", "mine", 3)


def test_an_engine_s_failure_is_logged_and_a_client_s_mistake_is_not(stream: io.StringIO) -> None:
    log(stream, "json", "info", "octavo.worker.request_log")
    log_failed(SequenceUpdate("r", 0, 0, (), FinishReason.ERROR, error="too long", param="prompt"))
    log_failed(SequenceUpdate("r", 0, 0, (), FinishReason.OVERLOADED, error="waited"))
    assert stream.getvalue() == ""
    log_failed(SequenceUpdate("r", 1, 0, (), FinishReason.ERROR, error="no number"))
    told = json.loads(stream.getvalue())
    assert (told["request_id"], told["branch"], told["error"]) == ("r", 1, "no number")
