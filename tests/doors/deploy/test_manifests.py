"""The manifests in deploy/ are valid by Kubernetes's own schemas and agree with each other; their configuration is read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.cli.app import run
from penstock.errors import ConfigError
from penstock.gateway.serving.toml_file import read_toml
from penstock.mount import MountConfig
from penstock.version import __version__

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCUMENTS = [
    (f"{path.name}: {document['kind']}", document)
    for path in MANIFESTS
    for document in yaml.safe_load_all(path.read_text())
]


def containers_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of a workload, those that run before the others included."""
    pod = document["spec"].get("template", {}).get("spec", {}) if "spec" in document else {}
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


MOUNTS = [
    (document, container)
    for _, document in DOCUMENTS
    for container in containers_of(document)
    if "penstock mount" in " ".join(container.get("args", []))
]


@pytest.mark.parametrize("document", [each[1] for each in DOCUMENTS], ids=[each[0] for each in DOCUMENTS])
def test_schema(document: dict[str, Any]) -> None:
    """Each object has the fields of its kind and no others, in the newest version that the schemas know."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_field_is_noticed() -> None:
    """The check refuses a field that does not exist."""
    document = next(each for name, each in DOCUMENTS if name.endswith(": Service"))
    wrong = {**document, "spec": {**document["spec"], "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_they_say_that_they_were_not_run() -> None:
    """Whoever opens a file sees what was checked and what was not."""
    for path in (*MANIFESTS, *(DEPLOY / "systemd").iterdir(), DEPLOY / "Containerfile"):
        first = path.read_text().partition("\n\n")[0]
        assert "ot run by this project's tests" in first or "Not built by this project's tests" in first, path.name


def test_selectors_meet_labels_and_ports() -> None:
    """Services and the autoscaler find the pods, and probes name a port that the container has."""
    pods = {}
    for _, document in DOCUMENTS:
        if document["kind"] in ("Deployment", "DaemonSet", "Job"):
            template = document["spec"]["template"]
            if document["kind"] != "Job":  # a Job chooses its selector itself
                assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
            pods[document["metadata"]["name"]] = template
            names = {volume["name"] for volume in template["spec"]["volumes"]}
            for container in containers_of(document):
                assert {mount["name"] for mount in container["volumeMounts"]} <= names
    for _, document in DOCUMENTS:
        if document["kind"] == "Service":
            found = [pod for pod in pods.values() if pod["metadata"]["labels"] == document["spec"]["selector"]]
            ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
            assert document["spec"]["ports"][0]["targetPort"] in ports
        if document["kind"] == "HorizontalPodAutoscaler":
            assert document["spec"]["scaleTargetRef"]["name"] in pods


def test_the_configuration_is_read(tmp_path: Path) -> None:
    """The TOML file in the ConfigMap has only keys that exist, and the drain fits the time that Kubernetes leaves."""
    config = next(each for name, each in DOCUMENTS if name.endswith(": ConfigMap"))
    path = tmp_path / "gateway.toml"
    path.write_text(config["data"]["gateway.toml"])
    made = read_toml(str(path))
    assert (made.host, made.port, made.status) == ("0.0.0.0", 9000, "metrics")
    deployment = next(each for name, each in DOCUMENTS if name.endswith(": Deployment"))
    assert made.drain_s_max + 10 <= deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("document", "container"), MOUNTS, ids=[each[0]["metadata"]["name"] for each in MOUNTS])
def test_the_mounts(
    document: dict[str, Any], container: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command mounts where the probe looks, and the other containers see the mount."""
    script, _, words = container["args"][0].partition("exec penstock ")
    volume = next(each for each in container["volumeMounts"] if each.get("mountPropagation") == "Bidirectional")
    pod = document["spec"]["template"]["spec"]
    assert container["securityContext"]["privileged"]  # the API server refuses Bidirectional without it
    assert pod.get("hostPID") or pod.get("shareProcessNamespace")
    mounted: list[MountConfig] = []

    class Recorder:
        def __init__(self, config: MountConfig) -> None:
            mounted.append(config)
            raise ConfigError("recorded")

    monkeypatch.setattr("penstock.mount.serving.MountServer", Recorder)
    assert run(words.replace("/var/cache/", f"{tmp_path}/").split()) == 2
    (config,) = mounted
    assert config.allow_other
    assert config.url == "s3://bucket/train/"
    assert Path(config.directory).parent == Path(volume["mountPath"])
    assert script == f"mkdir {config.directory}; "
    probe = container.get("startupProbe") or container["readinessProbe"]
    assert probe["exec"]["command"][-1] == config.directory
    for other in pod["containers"]:
        seen = {each["name"]: each.get("mountPropagation") for each in other["volumeMounts"]}
        assert seen[volume["name"]] == ("Bidirectional" if other is container else "HostToContainer")


def test_the_unit(tmp_path: Path) -> None:
    """systemd accepts the unit, with a program in place of the one that is not installed here."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "penstock-gateway.service").read_text()
    unit = tmp_path / "penstock-gateway.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", "/bin/true"))
    done = subprocess.run(
        [program, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "penstock-gateway" not in done.stderr


def test_the_image(tmp_path: Path) -> None:
    """What the Containerfile copies is enough to install what it names, and the manifests run the image that it makes."""
    root = DEPLOY.parent
    text = (DEPLOY / "Containerfile").read_text()
    tag = re.search(r"docker build --file deploy/Containerfile --tag (\S+) \.\n", text)
    assert tag
    assert tag[1] in {container["image"] for _, document in DOCUMENTS for container in containers_of(document)}
    assert tag[1].endswith(f":{__version__}")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *names, folder = line.split()
        copied = tmp_path / folder.lstrip("/")
        for path in (root / name for name in names):
            if path.is_dir():
                shutil.copytree(path, copied)
            else:
                copied.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copied)
    what, extras = re.findall(r"pip install --no-cache-dir '(.+)\[(.+)\]'", text)[0]
    project = tomllib.loads((tmp_path / what.lstrip("/") / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*command, f"{tmp_path}{what}"], check=True, timeout=100)
    told = subprocess.run(
        [sys.executable, "-c", "import penstock.gateway; print(penstock.__file__, penstock.__version__)"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert told.split() == [f"{tmp_path}/site/penstock/__init__.py", __version__]
