"""The examples of docs/launching/: run with stand-ins for the scheduler's programs, they agree with Paddle and us."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paddle.distributed.launch.context import args_envs
from ruamel.yaml import YAML

from vha_paddle.config import load_recipe

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "launching"
SLURM, KUBERNETES = EXAMPLES / "slurm.sbatch", EXAMPLES / "kubernetes.yaml"
PAGE = ROOT / "docs" / "launching.md"

# of sbatch(1), looked up in its manual
SBATCH_OPTIONS = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "output", "open-mode"}
SBATCH_OPTIONS |= {"requeue"}
RECIPE_ARGUMENTS = ["recipes/quickstart.yaml", "parallel.data=8", "data.global_batch_size=32"]  # tensor 2 x data 8

PYTHON = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
GETENT = """#!/bin/bash
[ "$1" = ahostsv4 ] || exit 1
case $2 in
    node-a | vha-train-0.vha-train) address=10.0.0.1 ;;
    node-b) address=10.0.0.2 ;;
    *) address=127.0.1.1 ;;
esac
printf '%s STREAM %s\\n%s DGRAM\\n' "$address" "$2" "$address"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames $NODELIST" ] || exit 1
printf '%s\\n' $NAMES
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
node=0
for name in $NAMES; do
    SLURM_NODEID=$node SLURMD_NODENAME=$name "$@" || exit
    node=$((node + 1))
done
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python` only writes down its arguments, and the cluster's programs answer."""
    programs = {"python": PYTHON.format(python=sys.executable), "getent": GETENT, "scontrol": SCONTROL, "srun": SRUN}
    programs["timeout"] = "#!/bin/bash\nexit 0\n"  # kubernetes.yaml asks with it whether the first pod listens
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}


def launches(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Paddle's own parser makes of each `python -m paddle.distributed.launch` that was started."""
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)
    parsed = []
    for line in Path(environment["RECORD"]).read_text().splitlines():
        option, module, *arguments = json.loads(line)
        assert (option, module) == ("-m", "paddle.distributed.launch")
        monkeypatch.setattr(sys, "argv", ["launch", *arguments])
        known, unknown = args_envs.parse_args()
        assert unknown == []
        parsed.append(known)
    return parsed


def run_slurm(environment: dict[str, str], names: str) -> subprocess.CompletedProcess[str]:
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "NODELIST": "node-[a-b]", "NAMES": names}
    command = ["bash", str(SLURM), *RECIPE_ARGUMENTS]
    return subprocess.run(command, env=environment | slurm, capture_output=True, text=True, timeout=60)


def check_nodes(nodes: list[Any]) -> None:
    """Two launchers that find each other, as many ranks as the recipe's degrees, and logs apart."""
    assert [node.rank for node in nodes] == [0, 1]
    assert {node.nnodes for node in nodes} == {"2"}
    (master,) = {node.master for node in nodes}
    # the launcher serves the master where the address equals its own, and never for a name
    assert re.fullmatch(r"10\.0\.0\.1:\d+", master) and 1024 < int(master.split(":")[1]) < 32768
    assert [node.host for node in nodes] == ["10.0.0.1", "10.0.0.2"]
    assert len({node.log_dir for node in nodes}) == 2
    assert {node.training_script for node in nodes} == {"tools/train.py"}
    (arguments,) = {tuple(node.training_script_args) for node in nodes}
    recipe = load_recipe(ROOT / arguments[0], list(arguments[1:]))
    assert recipe.num_ranks == sum(node.nproc_per_node for node in nodes)


def test_the_slurm_script_starts_launchers_that_agree(
    stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_slurm(stand_ins, "node-a node-b")
    assert result.returncode == 0, result.stderr
    nodes = launches(stand_ins, monkeypatch)
    check_nodes(nodes)
    assert nodes[0].training_script_args == RECIPE_ARGUMENTS


@pytest.mark.parametrize("names", ["node-a loopback", "loopback node-b"])
def test_the_slurm_script_refuses_a_node_known_by_a_loopback_address(stand_ins: dict[str, str], names: str) -> None:
    result = run_slurm(stand_ins, names)
    assert result.returncode == 2
    assert "error: loopback resolves to '127.0.1.1'" in result.stderr


def test_the_slurm_script_asks_sbatch_for_what_it_uses() -> None:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM.read_text(), re.MULTILINE)
    options = dict(lines)
    assert len(lines) == SLURM.read_text().count("\n#SBATCH")
    assert set(options) <= SBATCH_OPTIONS
    assert options["ntasks-per-node"] == "1"  # a launcher
    assert load_recipe(ROOT / RECIPE_ARGUMENTS[0], RECIPE_ARGUMENTS[1:]).num_ranks == int(options["nodes"]) * int(
        options["gpus-per-node"]
    )


@pytest.fixture
def documents() -> dict[str, Any]:
    """The documents of kubernetes.yaml by kind."""
    loaded = list(YAML(typ="safe").load_all(KUBERNETES))
    by_kind = {document["kind"]: document for document in loaded}
    assert len(by_kind) == len(loaded)
    return by_kind


def test_the_kubernetes_job_starts_launchers_that_agree(
    documents: dict[str, Any], stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    for index in range(documents["Job"]["spec"]["completions"]):
        pod = {"JOB_COMPLETION_INDEX": str(index), "ADDRESS": f"10.0.0.{index + 1}"}
        command = [*container["command"], *container["args"]]
        result = subprocess.run(command, env=stand_ins | pod, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
    nodes = launches(stand_ins, monkeypatch)
    check_nodes(nodes)
    assert {node.nproc_per_node for node in nodes} == {container["resources"]["limits"]["nvidia.com/gpu"]}


def test_the_kubernetes_documents_name_each_other(documents: dict[str, Any]) -> None:
    assert set(documents) == {"PersistentVolumeClaim", "Service", "Job"}
    service, job = documents["Service"], documents["Job"]
    assert [document["apiVersion"] for document in (service, job)] == ["v1", "batch/v1"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]  # a label that the Job gives its pods
    }
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"getent ahostsv4 {first_pod} " in container["args"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == set(volumes)
    claim = documents["PersistentVolumeClaim"]
    assert volumes["workspace"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert mounts["workspace"] == container["workingDir"] and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["shared-memory"] == "/dev/shm" and volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_every_option_the_page_explains_is_one_of_the_launchers() -> None:
    command = [sys.executable, "-m", "paddle.distributed.launch", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    known = set(re.findall(r"--[a-z_]+", help_text))
    rows = re.findall(r"^\| ((?:`--[a-z_]+`(?:, )?)+) \|", PAGE.read_text(), re.MULTILINE)
    explained = {option for row in rows for option in re.findall(r"--[a-z_]+", row)}
    assert len(explained) > 6 and explained <= known
