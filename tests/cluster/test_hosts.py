"""Hosts, the SSH program, what is compared before a launch, and what is remembered of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result
from serve_process import wait_until

from octavo.cluster.cli import main
from octavo.cluster.config import ServeConfig
from octavo.cluster.hosts.compare import Probed, head_address, probe_hosts, problems
from octavo.cluster.hosts.host import Host, parse_host, read_hosts
from octavo.cluster.hosts.launch import LaunchOptions, launch, said
from octavo.cluster.hosts.orders import Agents
from octavo.cluster.hosts.processes import ProcessId, end
from octavo.cluster.hosts.shell import Outcome, Shell, explain
from octavo.cluster.hosts.state import ClusterState, Member, StateFiles
from octavo.cluster.hosts.stop import take_down
from octavo.cluster.phases import Phases
from octavo.worker.errors import ConfigurationError

SHELL = f"{sys.executable} {Path(__file__).parent.parent / 'support' / 'local_shell.py'}"
HERE = metadata.version("octavo")
VERSIONS = {"octavo": HERE, "ray": "2.60.0", "torch": "2.13.0", "python": "3.11.7", "system": "Linux x86_64"}


def probed(name: str, **versions: str | None) -> Probed:
    return Probed(Host(name), "python", VERSIONS | versions, name, True, ("10.0.0.1",), 8, 0, 2**30)


# ---- how hosts are named ----


def test_a_line_of_a_hosts_file_says_where_and_what_is_particular(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# GPUs\nme@gpu1:2222 python=/opt/bin/python num_gpus=4  # the head\n\n[fd00::1] interface=ib0\n")
    assert read_hosts([], file, head_here=False) == (
        Host("gpu1", "me", 2222, python="/opt/bin/python", num_gpus=4),
        Host("fd00::1", interface="ib0"),
    )


def test_this_machine_can_be_the_head() -> None:
    assert read_hosts(["gpu1"], None, head_here=True) == (Host(""), Host("gpu1"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("-oProxyCommand=evil", "must be of the form user@host:port"),
        ("gpu1:99999", "the port must be between 1 and 65535, got 99999"),
        ("gpu1 gpus=4", "'gpus=4' is no setting; those of a host are python=, "),
        ("gpu1 num_gpus=four", "num_gpus must be a whole number, got 'four'"),
    ],
)
def test_a_wrong_host_is_named(words: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match="HOST: ") as error:
        parse_host(words, "HOST")
    assert complaint in str(error.value)


def test_a_host_is_not_named_twice() -> None:
    with pytest.raises(ConfigurationError, match="gpu1 is named twice"):
        read_hosts(["gpu1", "me@gpu1"], None, head_here=False)


# ---- how they are reached ----


def test_the_ssh_program_gets_one_word_for_the_remote_shell_and_asks_nobody() -> None:
    words = Shell("ssh -J jump").words(Host("gpu1", "me", 2222), ["python", "-c", "print('a b')"])
    assert words[:3] == ["ssh", "-J", "jump"]
    assert "BatchMode=yes" in words
    assert words[-5:] == ["-p", "2222", "--", "me@gpu1", """python -c 'print('"'"'a b'"'"')'"""]


def test_another_program_can_stand_in_for_ssh() -> None:
    words = Shell("kubectl exec -i {host} -- sh -c").words(Host("pod-1"), ["python", "-"])
    assert words == ["kubectl", "exec", "-i", "pod-1", "--", "sh", "-c", "python -"]


@pytest.mark.parametrize(
    ("code", "stderr", "advice"),
    [
        (255, "me@gpu1: Permission denied (publickey).", "the SSH key was refused"),
        (255, "ssh: Could not resolve hostname gpu1: Name or service not known", "no such host"),
        (255, "ssh: connect to host gpu1 port 22: Connection refused", "is sshd running"),
        (255, "ssh: connect to host gpu1 port 22: Connection timed out", "it does not answer"),
        (255, "Host key verification failed.", "its host key is unknown"),
        (127, "sh: 1: /opt/python: not found", "there is no Python at /opt/python"),
    ],
)
def test_a_host_that_cannot_be_used_gets_a_line_that_says_what_to_do(code: int, stderr: str, advice: str) -> None:
    assert advice in explain(Host("gpu1"), "/opt/python", Outcome(code, "", stderr))


def test_a_program_that_does_not_end_is_given_up() -> None:
    outcome = Shell(SHELL).run(Host("one"), ["sleep", "60"], stdin="", timeout_s=0.3)
    assert "no answer within 0.3 s" in outcome.stderr


# ---- what is compared ----


def test_hosts_are_asked_with_nothing_installed_but_python() -> None:
    hosts = [Host(""), Host("one", address="127.0.0.2"), Host("two", python="/nowhere/python"), Host("away")]
    found, away = probe_hosts(Shell(SHELL), hosts, None)
    assert [str(each.host) for each in found] == ["this machine", "one"]
    assert found[1].versions["ray"] is not None
    assert list(problems(found)) == []
    assert any("two: there is no Python at /nowhere/python" in line for line in away)
    assert any(line.startswith("away: ") and "does not answer" in line for line in away)


def test_one_machine_under_two_names_is_found() -> None:
    first, second = replace(probed("one"), hostname="gpu1"), replace(probed("two"), hostname="gpu1")
    assert list(problems([first, second])) == ["two: is the same machine as one; name it once"]
    apart = replace(second, host=Host("two", address="127.0.0.3"))
    assert list(problems([first, apart])) == []


def test_a_version_skew_is_found_and_says_which_to_install() -> None:
    hosts = [probed("one"), probed("two", ray="2.59.0"), probed("three", python="3.11.9"), probed("four", torch=None)]
    assert list(problems(hosts)) == [
        "two: ray 2.59.0, but 2.60.0 on one; install ray 2.60.0 there",
        "three: python 3.11.9, but 3.11.7 on one; install python 3.11.7 there",
        f"four: python has no torch; install octavo {HERE} there",
    ]


def test_what_a_host_lacks_by_itself_is_found() -> None:
    small = replace(probed("one"), shm_bytes=64 * 2**20)
    greedy = replace(probed("two"), host=Host("two", num_gpus=8), num_gpus=4)
    stranger = replace(probed("three"), host=Host("three", address="10.9.9.9"), has_address=False)
    lines = list(problems([small, greedy, stranger]))
    assert "64 MiB free in /dev/shm" in lines[0]
    assert "num_gpus=8, but it has 4" in lines[1]
    assert "address=10.9.9.9 is none of its addresses" in lines[2]


def test_the_head_is_reached_by_its_way_out() -> None:
    assert head_address(replace(probed("one"), sources=("127.0.0.1", "10.0.0.7"))) == "10.0.0.7"
    assert head_address(replace(probed("one"), host=Host("one", address="10.0.1.7"))) == "10.0.1.7"


def test_nothing_is_started_when_a_host_is_away_or_cannot_hold_what_is_asked(tmp_path: Path) -> None:
    config = ServeConfig.parse({"cache_dir": tmp_path, "tensor_parallel_size": 64})
    for hosts, complaint in (((Host("one"), Host("away")), "away: "), ((Host("one"),), "64 ranks of 1 CPU")):
        options = LaunchOptions(hosts, "name", None, SHELL, 0)
        with pytest.raises(ConfigurationError, match=complaint):
            launch(options, config, Phases(sys.stderr))
    assert StateFiles(tmp_path).names() == []


def test_hosts_are_told_what_was_set_and_keep_their_own_defaults() -> None:
    values = said(ServeConfig.parse({"replicas": 2, "api_key": ["secret"]}))
    assert values["replicas"] == 2
    assert values["api_key"][0].startswith("sha256:")
    assert "cache_dir" not in values


# ---- what is remembered, and ended ----


def state(*members: Member, name: str = "name") -> ClusterState:
    return ClusterState(name, "abcd", "now", SHELL, "token", "octavo", 1, 30.0, members)


def test_the_state_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    before = state(Member(Host("one", num_cpus=2), "python", 0, "10.0.0.1", (ProcessId(1, 2, "boot", "init"),)))
    files.create(before)
    assert files.load("name") == before
    assert stat.S_IMODE(os.stat(files.path("name")).st_mode) == 0o600
    with pytest.raises(ConfigurationError, match="was launched already"):
        files.create(before)
    with pytest.raises(ConfigurationError, match="must be up to 63"):
        files.path("../name")


def test_a_half_written_state_is_said(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.create(state())
    files.path("name").write_text('{"name": "na')
    with pytest.raises(ConfigurationError, match="cannot be read"):
        files.load("name")


def test_a_process_is_known_by_its_start_and_ended_with_its_children() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    children = psutil.Process(process.pid).children
    wait_until(lambda: [child.name() for child in children()] == ["sleep"], timeout_s=20, what="its child")
    identity = ProcessId.of(process.pid)
    assert identity is not None
    somebody_else = replace(identity, started=identity.started - 1)
    assert not somebody_else.is_alive
    assert end([somebody_else], 1.0) == []
    assert process.poll() is None
    ended = end([identity], 5.0)
    process.wait(5)
    assert any(name.startswith("sleep") for name in ended)
    assert not identity.is_alive


def test_what_is_on_a_host_that_is_away_is_remembered_and_the_rest_is_ended(tmp_path: Path) -> None:
    files, notes = StateFiles(tmp_path), []
    process = subprocess.Popen(["sleep", "60"])
    identity = ProcessId.of(process.pid)
    assert identity is not None
    cluster = state(Member(Host("away"), sys.executable, 0), Member(Host("two"), sys.executable, 1, "", (identity,)))
    files.create(cluster)
    left = take_down(cluster, files, Agents(Shell(SHELL), cluster.id, notes.append), notes.append, drains=True)
    process.wait(5)
    assert [line.partition(":")[0] for line in left] == ["away"]
    assert any("two: ended sleep" in note for note in notes)
    remembered = files.load("name")
    assert remembered is not None
    assert [member.host.name for member in remembered.members] == ["away"]


# ---- the commands ----


def refused(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="octavo")


def test_a_launch_without_hosts_or_with_a_ray_of_somebody_s_is_refused() -> None:
    assert "octavo launch: error: HOST: name at least one host" in refused("launch").stderr
    assert "--hosts: nowhere cannot be read" in refused("launch", "--hosts", "nowhere").stderr
    assert "No such option '--address'" in refused("launch", "gpu1", "--address", "gpu2:6379").stderr


def test_an_interrupted_launch_ends_what_runs_for_it() -> None:
    shell = Shell(SHELL)

    def sleep(name: str) -> Outcome:
        if name == "interrupts":
            raise KeyboardInterrupt
        return shell.run(Host(name), ["sleep", "60"], stdin="", timeout_s=60)

    with pytest.raises(KeyboardInterrupt):
        shell.on_all(sleep, ["interrupts", "one"])


def test_stopping_again_is_no_error_and_a_cluster_among_several_must_be_named(tmp_path: Path) -> None:
    words = ("stop", "--cache-dir", str(tmp_path))
    again = refused(*words)
    assert (again.exit_code, "nothing to stop" in again.stderr) == (0, True)
    files = StateFiles(tmp_path)
    files.create(state(name="first"))
    files.create(state(name="second"))
    which = refused(*words)
    assert which.exit_code == 2
    assert "NAME: say which of first, second" in which.stderr
    assert "(there are: first, second)" in refused(*words, "third").stderr
