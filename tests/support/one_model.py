"""Judges of a gateway that serves one model."""

from __future__ import annotations

from octavo.cluster.api.request.judged import RequestJudge
from octavo.cluster.api.request.judges import Judges
from octavo.cluster.api.service import ServedModel
from octavo.cluster.api.text.processor import TextProcessor


def one_model(text: TextProcessor, info: ServedModel) -> Judges:
    return Judges([RequestJudge(text, info)])
