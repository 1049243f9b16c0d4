"""The KubeRay manifests, rendered by kustomize as `kubectl apply -k` does, held against their schemas."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.serve.config import HTTPOptions

from cluster import leaving
from cluster.leaving import middlewares
from cluster.operate.check import mistakes, serve_config
from tests.manifests.ray_cluster import MANIFESTS

KUBERAY = MANIFESTS / "kuberay"
OVERLAYS = ("dev", "h100", "h200")
GPU_OVERLAYS = {"h100": "H100", "h200": "H200"}
CRD = os.environ.get("KUBERAY_CRD")
KUSTOMIZE = next(([tool, *words] for tool, words in (("kustomize", ["build"]), ("kubectl", ["kustomize"]))
                  if shutil.which(tool)), None)  # fmt: skip
pytestmark = pytest.mark.skipif(KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed")
needs_crd = pytest.mark.skipif(
    CRD is None, reason="KUBERAY_CRD is not set: it names a file with KubeRay's CRD of RayService"
)

Document = dict[str, Any]


@cache
def render(overlay: str, manifests: Path = KUBERAY) -> tuple[Document, ...]:
    assert KUSTOMIZE is not None
    done = subprocess.run(
        [*KUSTOMIZE, str(manifests / "overlays" / overlay)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def ray_service(overlay: str) -> Document:
    (found,) = [document for document in render(overlay) if document["kind"] == "RayService"]
    return deepcopy(found)


def serve(overlay: str) -> Document:
    found = serve_config(ray_service(overlay), Path(overlay))
    assert found is not None
    return found


def deployment(overlay: str, name: str) -> Document:
    found = [entry for app in serve(overlay)["applications"] for entry in app.get("deployments", [])]
    return next(entry for entry in found if entry["name"] == name)


def engine_group(overlay: str) -> Document:
    (group,) = ray_service(overlay)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found: Document = group
    return found


@cache
def crd_schema() -> Document:
    """The schema of a RayService, with every key that it does not name refused: Kubernetes would drop it."""
    assert CRD is not None
    versions = yaml.load(Path(CRD).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"][
        "versions"
    ]
    schema = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {
        "type": "object",
        "properties": {key: {} for key in ("name", "namespace", "labels", "annotations")},
    }

    def close(node: Any) -> None:
        if isinstance(node, dict):
            free = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
            if isinstance(node.get("properties"), dict) and not free:
                node["additionalProperties"] = False
            for value in node.values():
                close(value)
        elif isinstance(node, list):
            for value in node:
                close(value)

    close(schema)
    found: Document = schema
    return found


def refused(document: Document) -> str:
    with pytest.raises(jsonschema.ValidationError) as error:
        jsonschema.validate(document, crd_schema())
    return str(error.value.message)


@needs_crd
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_ray_service_is_one(overlay: str) -> None:
    jsonschema.validate(ray_service(overlay), crd_schema())


def mistyped(document: Document) -> None:
    cluster = document["spec"]["rayClusterConfig"]
    cluster["gcsFaultTolerance"] = cluster.pop("gcsFaultToleranceOptions")


def in_the_pod(document: Document) -> None:
    document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["nodeselector"] = {}


def old_autoscaler(document: Document) -> None:
    document["spec"]["rayClusterConfig"]["autoscalerOptions"]["version"] = "v3"


@needs_crd
@pytest.mark.parametrize(
    ("spoil", "word"), [(mistyped, "gcsFaultTolerance"), (in_the_pod, "nodeselector"), (old_autoscaler, "v3")]
)
def test_a_wrong_ray_service_is_refused(spoil: Callable[[Document], None], word: str) -> None:
    document = ray_service("h100")
    spoil(document)
    assert word in refused(document)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_core_objects_are_what_kubernetes_knows(overlay: str) -> None:
    core = [document for document in render(overlay) if document["kind"] != "RayService"]
    for document in core:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    kinds = {document["kind"] for document in core}
    assert kinds >= {"NetworkPolicy", "PodDisruptionBudget"}
    assert "Secret" not in kinds, "secrets are made by hand, not kept in files"
    assert "ConfigMap" not in kinds, "serve.yaml goes into the RayService alone"
    policy = next(document for document in core if document["kind"] == "NetworkPolicy")
    policy["spec"]["podSelektor"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="podSelektor"):
        kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_serve_config_is_the_overlays_file_and_has_no_mistake(overlay: str) -> None:
    assert serve(overlay) == yaml.safe_load((KUBERAY / "overlays" / overlay / "serve.yaml").read_text())
    assert list(mistakes(serve(overlay))) == []
    assert [(app["name"], app["route_prefix"]) for app in serve(overlay)["applications"]] == [
        ("api", "/"),
        ("playground", "/playground"),
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_drain_lasts_as_long_as_the_answers_that_it_waits_for(overlay: str) -> None:
    spec = ray_service(overlay)["spec"]
    pod = engine_group(overlay)["template"]["spec"]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    keeps = serve(overlay).get("http_options", {}).get("keep_alive_timeout_s", HTTPOptions().keep_alive_timeout_s)
    stays = float(environment["RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"])
    assert stays > keeps, "the proxy would go while it keeps an idle connection"
    assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == f"{leaving.__name__}:{middlewares.__name__}"
    waits = [
        deployment(overlay, "Engine")["graceful_shutdown_timeout_s"],
        deployment(overlay, "Ingress")["graceful_shutdown_timeout_s"],
        int(hook[hook.index("--seconds") + 1]),
        pod["terminationGracePeriodSeconds"],
    ]
    assert waits == sorted(set(waits)), "engine, then ingress, then the hook, then Kubernetes"
    assert waits[2] >= waits[1] + stays, "the ingress' last client has time to leave"
    assert spec["rayClusterDeletionDelaySeconds"] >= waits[-1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_head_serves_nothing(overlay: str) -> None:
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["authOptions"]["mode"] == "token"
    for app in serve(overlay)["applications"]:
        for entry in app["deployments"]:
            cpus = entry.get("ray_actor_options", {}).get("num_cpus", 1 if entry["name"] == "Engine" else 0)
            assert cpus > 0, f"{entry['name']} could be put on the head"


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_no_worker_carries_all_ingresses_in_an_update_either(overlay: str) -> None:
    """Those of a new cluster would all come to the first worker, whose loss would cut every stream."""
    ingress, engine = deployment(overlay, "Ingress"), deployment(overlay, "Engine")
    a_node, workers = ingress["max_replicas_per_node"], engine["autoscaling_config"]["min_replicas"]
    assert a_node < ingress["num_replicas"]
    assert a_node * workers >= 2 * ingress["num_replicas"], "in an update each has its successor beside it"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_may_gain_rights(overlay: str) -> None:
    """As namespaces ask for that keep to the restricted of the pod security standards."""
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], engine_group(overlay)["template"]["spec"]]
    containers = [container for pod in pods for container in pod["containers"]]
    for part in (*containers, cluster["autoscalerOptions"]):
        assert part["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(("overlay", "gpu"), GPU_OVERLAYS.items())
def test_gpus_engines_and_pods_agree(overlay: str, gpu: str) -> None:
    """As Ray's own autoscaler reads the manifest: a worker fits one engine, and there are workers for all of them."""
    service, group, engine = ray_service(overlay), engine_group(overlay), deployment(overlay, "Engine")
    pod = group["template"]["spec"]
    args = serve(overlay)["applications"][0]["args"]
    assert args["accelerator"] == gpu
    assert args["device"] == "cuda"
    assert gpu in pod["nodeSelector"]["nvidia.com/gpu.product"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    offered = _generate_available_node_types_from_ray_cr_spec(service["spec"]["rayClusterConfig"])["engines"]
    assert offered["resources"]["GPU"] == 1
    assert offered["resources"][f"accelerator_type:{gpu}"] == 1
    assert offered["resources"]["CPU"] > args["threads"]
    params = group["rayStartParams"]
    # KubeRay reads them too, as JSON within quotes, and leaves out what stands behind what it cannot read.
    assert json.loads(params["resources"].strip("'\"` ")) == {f"accelerator_type:{gpu}": 1}
    assert params["num-gpus"] == "1"
    kept = group["template"]["metadata"]["annotations"]
    assert kept["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert kept["karpenter.sh/do-not-disrupt"] == "true"
    scaling = engine["autoscaling_config"]
    assert offered["min_workers"] == 0, "an upgrade's new cluster would ask for all of them at once"
    surge = -(-scaling["max_replicas"] * engine["max_surge_percent"] // 100)
    assert scaling["max_replicas"] + surge <= offered["max_workers"], "a rolling update would wait for ever"
    (budget,) = [document for document in render(overlay) if document["kind"] == "PodDisruptionBudget"]
    assert 0 < budget["spec"]["minAvailable"] < scaling["min_replicas"], "some pod must be free to go"
    assert budget["spec"]["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_ingresses_can_have_workers_without_a_gpu(overlay: str, tmp_path: Path) -> None:
    """As `components/front` says: each fits as many as its comment says, and no engine."""
    manifests = tmp_path / "kuberay"
    shutil.copytree(KUBERAY, manifests)
    file = manifests / "overlays" / overlay / "kustomization.yaml"
    before = "  - ../../components/gpu\n"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, f"  - ../../components/front\n{before}"))
    documents = render(overlay, manifests)
    (service,) = (each for each in documents if each["kind"] == "RayService")
    engines, front = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert engines == engine_group(overlay), "that of the engines is left alone"
    offered = _generate_available_node_types_from_ray_cr_spec(service["spec"]["rayClusterConfig"])["front"]
    assert offered["min_workers"] <= offered["max_workers"]
    resources = offered["resources"]
    assert "GPU" not in resources
    read = json.loads(front["rayStartParams"]["resources"].strip("'\"` "))
    assert read == {"front": resources["front"]}
    comment = (KUBERAY / "components" / "front" / "kustomization.yaml").read_text()
    assert "num_cpus: 1 " in comment
    assert "resources: {front: 1} " in comment
    assert 2 <= resources["front"] <= resources["CPU"]
    label = front["template"]["metadata"]["labels"].items()
    budgets = [each["spec"]["selector"]["matchLabels"] for each in documents if each["kind"] == "PodDisruptionBudget"]
    assert [budget.items() <= label for budget in budgets].count(True) == 1
    (policy,) = (each["spec"] for each in documents if each["metadata"]["name"] == "tidar-ray")
    (chosen,) = policy["podSelector"]["matchExpressions"]
    assert front["template"]["metadata"]["labels"][chosen["key"]] in chosen["values"]
    pods = [group["template"]["spec"] for group in (front, engines)]
    for part in ("volumes", "terminationGracePeriodSeconds", "securityContext"):
        assert pods[0][part] == pods[1][part]
    assert pods[0]["containers"][0]["env"] == pods[1]["containers"][0]["env"]


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_what_must_not_go_down_does_not(overlay: str) -> None:
    spec = ray_service(overlay)["spec"]
    assert spec["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade"
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"], "an incremental upgrade needs it"
    redis = spec["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"].split(":")[0]
    objects = {(document["kind"], document["metadata"]["name"]) for document in render(overlay)}
    assert ("Service", redis) in objects
    for group in (spec["rayClusterConfig"]["headGroupSpec"], engine_group(overlay)):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert ("PersistentVolumeClaim", volumes["models"]["persistentVolumeClaim"]["claimName"]) in objects
        assert volumes["keys"]["secret"] == {"secretName": "tidar-api-keys"}, "without keys no pod starts"
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)


def test_the_ray_that_is_named_is_the_one_that_is_installed() -> None:
    (pinned,) = re.findall(r"^ray==(.+)$", (MANIFESTS / "constraints.txt").read_text(), re.MULTILINE)
    for overlay in OVERLAYS:
        assert ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"] == pinned


def yaml_files() -> Iterator[str]:
    for path in sorted([*MANIFESTS.rglob("*.yaml"), *MANIFESTS.rglob("*.yml"), *MANIFESTS.rglob("*.json")]):
        yield str(path.relative_to(MANIFESTS))


def test_no_file_goes_unread() -> None:
    """Each file is rendered by kustomize above, or has a test of its own beside this one."""
    used = {f"kuberay/overlays/{name}/{file}" for name in OVERLAYS for file in ("kustomization.yaml", "serve.yaml")}
    pending = [KUBERAY / "components" / "front", *(KUBERAY / "overlays" / name for name in OVERLAYS)]
    while pending:
        directory = pending.pop()
        file = directory / "kustomization.yaml"
        used.add(str(file.relative_to(MANIFESTS)))
        read = yaml.safe_load(file.read_text())
        for name in [*read.get("resources", []), *read.get("components", [])]:
            path = (directory / name).resolve()
            if path.is_dir():
                pending.append(path)
            else:
                used.add(str(path.relative_to(MANIFESTS)))
    elsewhere = {f"serve/{name}.yaml" for name in ("one-machine", "node-8gpu", "fleet")}
    elsewhere |= {
        f"observability/{name}" for name in ("prometheus.yml", "rules.yml", "rules_test.yml", "dashboard.json")
    }
    assert set(yaml_files()) == used | elsewhere
