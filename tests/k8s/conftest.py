"""Every overlay and every example of the chart, rendered once."""

from __future__ import annotations

import pytest
from manifests import CHART, K8S, NAMES, Rendered, helm_template, kustomize

SOURCES = [f"{tool}/{name}" for tool in ("kustomize", "helm") for name in NAMES]


@pytest.fixture(scope="session")
def all_rendered() -> dict[str, Rendered]:
    overlays = {f"kustomize/{name}": kustomize(K8S / "overlays" / name) for name in NAMES}
    examples = {f"helm/{name}": helm_template("--values", CHART / "examples" / f"{name}.yaml") for name in NAMES}
    return {name: Rendered(tuple(found)) for name, found in (overlays | examples).items()}


@pytest.fixture(params=SOURCES)
def rendered(request: pytest.FixtureRequest, all_rendered: dict[str, Rendered]) -> Rendered:
    return all_rendered[request.param]
