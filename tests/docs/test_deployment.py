"""The files of `deploy` call the program as it is, and fit Kubernetes, bash and systemd."""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_lines import require_sound

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SCHEMA = json.loads((DEPLOY.parent / "tests" / "support" / "kubernetes.json").read_text())
MANIFESTS = sorted((DEPLOY / "kubernetes").iterdir())
SCRIPTS = sorted((DEPLOY / "slurm").iterdir())


def objects_of(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text()))


def container() -> tuple[list[str], list[str]]:
    text = (DEPLOY / "Dockerfile").read_text()
    found = dict(re.findall(r"^(ENTRYPOINT|CMD) (.*)$", text, re.M))
    return json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])


def require_program(words: list[str]) -> None:
    program, *rest = words
    assert program == "moe-runtime"
    require_sound(" ".join(rest))


def test_every_file_is_in_the_table():
    text = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"\]\(([\w/.-]+)\)", text))
    files = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert files - {"README.md"} <= named


def test_the_unit_and_the_container_call_the_program_as_it_is():
    unit = (DEPLOY / "moe-runtime.service").read_text()
    (started,) = re.findall(r"^ExecStart=\S*/moe-runtime (.*)$", unit, re.M)
    require_sound(started)
    entry, command = container()
    require_program([*entry, *command])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["moe-runtime"]
    folder = DEPLOY / compose["build"]["context"]
    assert (folder / compose["build"]["dockerfile"]).is_file()
    assert f"/run/secrets/{compose['secrets'][0]}" in entry
    assert [volume.rsplit(":", 2)[1] for volume in compose["volumes"]] == [entry[2]]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_knows_all_of_the_unit(tmp_path):
    unit = (DEPLOY / "moe-runtime.service").read_text()
    program = tmp_path / "moe-runtime"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    here = tmp_path / "moe-runtime.service"
    here.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={program}", unit, flags=re.M))
    words = ["systemd-analyze", "verify", "--recursive-errors=no", str(here)]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    assert str(here) not in said
    assert "moe-runtime.service:" not in said


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schemas_and_the_container(manifest):
    for one in objects_of(manifest):
        jsonschema.validate(one, SCHEMA)
        if one["kind"] == "Service":
            continue
        spec = one["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
        (pod,) = template["spec"]["containers"]
        entry, _ = container()
        words = [*pod.get("command", entry), *pod["args"]]
        require_program(words[words.index("moe-runtime") :])
        mounted = {mount["name"]: mount["mountPath"] for mount in pod["volumeMounts"]}
        assert mounted["checkpoint"] in words
        # Kubernetes would make the token's folder in that of the keys, which is read-only
        assert template["spec"]["automountServiceAccountToken"] is False
        assert mounted.keys() <= {volume["name"] for volume in template["spec"]["volumes"]}


def test_a_service_finds_its_pods():
    deployment, service = objects_of(DEPLOY / "kubernetes" / "deployment.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in pod["ports"]}
    probed = {pod[name]["httpGet"]["port"] for name in pod if name.endswith("Probe")}
    assert probed | {service["spec"]["ports"][0]["targetPort"]} <= ports


STANDING_IN = """#!/bin/bash
name=$(basename "$0")
echo "$name $*" >> "$CALLS"
case "$name" in
  scontrol) printf 'node1\\nnode2\\n' ;;
  ray) [ "$1" = status ] && cat "$NODES" ;;
  srun) while [[ "$1" == --* ]]; do shift; done; exec "$@" ;;
esac
"""


def run_script(script: Path, tmp_path: Path, **variables: str) -> tuple[Any, str]:
    """With programs in the place of Slurm's, torchrun and Ray, which note how they are called."""
    for name in ("scontrol", "srun", "torchrun", "ray", "moe-runtime"):
        path = tmp_path / name
        path.write_text(STANDING_IN)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), **variables}
    words = ["bash", str(script), "MODEL", "IN.jsonl", "OUT.jsonl"]
    ended = subprocess.run(words, check=False, env={**os.environ, **job}, stderr=subprocess.PIPE)
    return ended, calls.read_text()


RAY_STATUS = """Node status
Active:
 1 node_2f8c0000000000000000000000000000
 1 node_77ab0000000000000000000000000000
Pending:
 (no pending nodes)
Recent failures:
 (no failures)
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_scripts_start_the_program_on_their_nodes(script, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text(RAY_STATUS)
    ended, said = run_script(script, tmp_path, NODES=str(nodes))
    assert ended.returncode == 0
    program = next(re.finditer(r"moe-runtime (run|generate|train) .*", said))
    require_program(program[0].split())
    assert "node1:20077" in said
    assert "MODEL" in program[0]
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.M)
    assert set(options) <= {"job-name", "nodes", "ntasks-per-node", "output", "requeue", "no-kill"}
