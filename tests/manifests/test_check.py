"""`tidar check` and what it stands on: every kind of mistake in a Serve config is a line that says what to change."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from cluster.operate.check import mistakes
from playground.app import build as build_playground
from tests.manifests.ray_cluster import MANIFESTS
from tests.servers import tiny_model
from tests.tiny import tiny_adapter, tiny_checkpoint
from tidar_core.cli import app

FILES = sorted((MANIFESTS / "serve").glob("*.yaml"))
FLEET: dict[str, Any] = yaml.safe_load((MANIFESTS / "serve" / "fleet.yaml").read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_files_that_are_shipped_have_none(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(config)
    assert list(mistakes(config)) == []
    assert [(app["import_path"], app["route_prefix"]) for app in config["applications"]] == [
        ("cluster.app:build", "/"),
        ("playground.app:build", "/playground"),
    ]


def spoiled(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The fleet's config with one value changed or added."""
    config = deepcopy(FLEET)
    target: Any = config
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    return config


APP = ("applications", 0)
ENGINE = (*APP, "deployments", 0)


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        (("http_option",), {}, "the file: unknown key 'http_option': did you mean 'http_options'?"),
        (("http_options", "prot"), 1, "http_options: unknown key 'prot': did you mean 'port'?"),
        (("logging_config", "encodin"), 1, "logging_config: unknown key 'encodin': did you mean 'encoding'?"),
        ((*APP, "arg"), {}, "applications[0]: unknown key 'arg': did you mean 'args'?"),
        ((*APP, "args", "modle"), "x", "applications[0]: args: unknown key 'modle': did you mean 'model'?"),
        ((*APP, "args", "dtype"), "int3", "args: dtype is 'int3': input should be 'bfloat16', 'float32', 'float8'"),
        ((*APP, "args", "generation_config"), "vllm", "args: generation_config is 'vllm': input should be 'auto' or"),
        ((*APP, "args", "dtype"), "int8", "args: dtype int8 is for CPUs; use bfloat16 or float8 on a GPU"),
        ((*APP, "args", "model"), "smollm2-135m-instrct", "args: there is no 'smollm2-135m-instrct': did you mean"),
        ((*APP, "args", "adapter"), "defalt", "args: there is no 'defalt': did you mean 'default'?"),
        ((*APP, "runtime_env"), {"env_vars": {"OMP_NUM_THREADS": 4}}, "runtime_env: env_vars: 4 of OMP_NUM_THREADS"),
        ((*APP, "runtime_env"), {"env_vars": ["A=1"]}, "runtime_env: env_vars is no mapping: give names and values"),
        ((*APP, "runtime_env"), {"working_dir": 3}, "path_or_uri must be a string, got <class 'int'>"),
        ((*APP, "runtime_env"), {"env_var": {}}, "runtime_env: unknown key 'env_var': did you mean 'env_vars'?"),
        (
            (*APP, "deployments", 1, "ray_actor_options"),
            {"runtime_env": {"env_vars": {"DEBUG": True}}},
            "deployment Ingress: runtime_env: env_vars: True of DEBUG is no text: put it in quotes",
        ),
        ((*APP, "args", "replicas"), 0, "args: replicas is 0: a model that may sleep has min_replicas 0 and max_r"),
        ((*APP, "args", "min_replicas"), 0, "args: min_replicas needs max_replicas; without it there are always"),
        ((*APP, "args", "max_replicas"), 8, "Engine: autoscaling_config would take the place of the args' max_replic"),
        ((*APP, "args", "wake_seconds"), 5, "args: wake_seconds needs max_replicas"),
        ((*APP, "args", "max_replica"), 8, "args: unknown key 'max_replica': did you mean 'max_replicas'?"),
        ((*APP, "args", "downscale_delay_s"), -1, "args: downscale_delay_s is -1: input should be greater than or"),
        ((*APP, "args", "device"), "cpu", "args: accelerator H100 is a GPU, but device is cpu; leave one of"),
        ((*APP, "args", "carry_seconds"), float("inf"), "args: carry_seconds is inf: input should be a finite number"),
        ((*APP, "args", "model"), "", "args: model is '': string should have at least 1 character"),
        (("applications",), [], "applications: there are none"),
        ((*APP, "args", "accelerator"), "h100", "accelerator 'h100' is no GPU that Ray knows: did you mean 'H100'?"),
        ((*APP, "args", "accelerator"), "TPU", "is no GPU that Ray knows: there are V100"),
        ((*APP, "import_path"), "cluster.app:biuld", "import_path 'cluster.app:biuld' is none of cluster.app:build, "),
        (ENGINE, "Engine", "deployments[0] is no mapping: give its name and settings"),
        ((*ENGINE, "name"), "Engin", "unknown deployment 'Engin': did you mean 'Engine'?"),
        ((*ENGINE, "num_replica"), 2, "deployments[0]: unknown key 'num_replica': did you mean 'num_replicas'?"),
        ((*ENGINE, "num_replicas"), 0, "deployment Engine: num_replicas is 0: no request would wake the model"),
        ((*ENGINE, "autoscaling_config", "min_replicas"), 0, "Engine: min_replicas is 0: only in args is it"),
        ((*ENGINE, "autoscaling_config", "policy"), {"policy_function": "cluster.no:No"}, "policy_function cannot be"),
        ((*ENGINE, "autoscaling_config", "max_replica"), 9, "unknown key 'max_replica': did you mean 'max_replicas'?"),
        ((*ENGINE, "autoscaling_config", "max_replicas"), 1, "max_replicas"),
        ((*ENGINE, "ray_actor_options"), {"num_cpus": 2}, "would take the place of the engine's own, its GPU too"),
        ((*ENGINE, "num_replicas"), 3, "Manually setting num_replicas is not allowed when autoscaling_"),
        ((*ENGINE, "rolling_update_percentage"), 10, "rolling_update_percentage is 10: input should be less than"),
        ((*APP, "args", "replicas"), 1, "Engine: autoscaling_config would take the place of the args' replicas; leave"),
        ((*APP, "args", "ingresses"), 2, "Ingress: num_replicas would take the place of the args' ingresses; leave"),
        ((*APP, "deployments", 1, "name"), "Engine", "deployment Engine is listed twice; put the settings of both int"),
        ((*APP, "deployments", 1, "user_config"), {}, "deployment Ingress: user_config is nothing that it takes"),
        ((*APP, "route_prefix"), "playground", "route_prefix is 'playground': write it as /name, without a / at its"),
        ((*APP, "route_prefix"), "/v1/", "route_prefix is '/v1/': write it as /name, without a / at its end"),
        (("applications", 1, "route_prefix"), "/", "applications: found duplicate applications for route prefix"),
        (("applications", 1, "name"), "api", "applications: found multiple configs for application"),
        (("http_options", "port"), 70000, "http_options.port is 70000: a port lies between 1 and 65535"),
        (("http_options", "keep_alive_timeout_s"), -1, "http_options.keep_alive_timeout_s is -1: it must be 0 or more"),
        ((*APP, "args", "dtype"), "x" * 500, "args: dtype is 'xxx"),
    ],
)  # fmt: skip
def test_a_mistake_is_told(place: tuple[Any, ...], value: Any, line: str) -> None:
    found = list(mistakes(spoiled(place, value)))
    assert any(line.lower() in said.lower() for said in found), found
    assert all("\n" not in said and (len(said) < 200 or "there are" in said) for said in found)


def test_the_page_that_the_api_leads_to_is_there() -> None:
    alone = spoiled(("applications",), deepcopy(FLEET["applications"][:1]))
    elsewhere = spoiled(("applications", 1, "route_prefix"), "/page")
    for config in (alone, elsewhere):
        (line,) = mistakes(config)
        assert line.startswith("applications[0] leads to /playground: add playground.app:build with that route_prefix")
        config["applications"][0]["args"]["playground"] = False
        assert list(mistakes(config)) == []
    below = spoiled((*APP, "route_prefix"), "/models")
    (line,) = mistakes(below)
    assert line.startswith("applications[0] leads to /models/playground: ")
    below["applications"][1]["route_prefix"] = "/models/playground"
    assert list(mistakes(below)) == []
    assert list(mistakes(spoiled((*APP, "route_prefix"), None))) == [], "whoever has no way to it is not led"


def test_each_models_own_number_of_replicas_is_said_once() -> None:
    config = spoiled((*APP, "args", "models"), {"a": {"model": "org/a", "replicas": 2}, "b": {"model": "org/b"}})
    config["applications"][0]["deployments"] += [{"name": f"Engine-{name}", "num_replicas": 3} for name in "ab"]
    (line,) = mistakes(config)
    assert line.endswith("Engine-a: num_replicas would take the place of the args' models.a.replicas; leave one out")


def test_all_mistakes_of_an_application_are_told_at_once() -> None:
    found = list(mistakes(spoiled((*APP, "args"), {"modle": "tiny", "replicas": 0, "dtype": "float64"})))
    assert len(found) == 3
    assert all(line.startswith("applications[0]: args: ") for line in found)
    assert all(any(key in line for line in found) for key in ("modle", "replicas", "dtype"))


def test_an_adapter_that_does_not_fit_is_told(tmp_path: Path) -> None:
    model, adapter = tiny_model(tmp_path)
    misfit = tiny_adapter(tmp_path / "misfit", tiny_checkpoint(tmp_path / "narrow", hidden=48))

    def with_adapter(path: Path) -> list[str]:
        config = spoiled((*APP, "args", "adapter"), str(path))
        config["applications"][0]["args"]["model"] = str(model)
        return list(mistakes(config))

    assert with_adapter(adapter) == []
    (line,) = with_adapter(misfit)
    assert line == (
        "applications[0]: args: adapter misfit does not fit: made for narrow with hidden_size 48, tiny has 96; "
        "name another adapter, 'default' or 'none'"
    )


def test_the_command_ends_as_a_script_expects(tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["check", *map(str, FILES)]).exit_code == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(spoiled(("http_option",), {})))
    told = runner.invoke(app, ["check", str(FILES[0]), str(wrong)])
    assert told.exit_code == 1
    assert told.stderr == f"{wrong}: the file: unknown key 'http_option': did you mean 'http_options'?\n"
    wrong.write_text("applications: [")
    assert "cannot be read" in runner.invoke(app, ["check", str(wrong)]).stderr
    wrong.write_text("kind: Service")
    assert "neither a Serve config" in runner.invoke(app, ["check", str(wrong)]).stderr
    for empty in (None, {}, {"serveConfigV2": None}):
        wrong.write_text(yaml.safe_dump({"kind": "RayService", "spec": empty}))
        assert runner.invoke(app, ["check", str(wrong)]).stderr.startswith(f"{wrong}: ")
    for odd in ([], "text", {"serveConfigV2": {"applications": []}}, {"serveConfigV2": [1]}):
        wrong.write_text(yaml.safe_dump({"kind": "RayService", "spec": odd or ["x"]}))
        assert "write `serveConfigV2: |`" in runner.invoke(app, ["check", str(wrong)]).stderr
    service = {"kind": "RayService", "spec": {"serveConfigV2": yaml.safe_dump(spoiled((*APP, "arg"), {}))}}
    wrong.write_text(yaml.safe_dump(service))
    assert "unknown key 'arg'" in runner.invoke(app, ["check", str(wrong)]).stderr


def test_a_key_that_stands_twice_is_told(tmp_path: Path) -> None:
    def told(text: str) -> str:
        wrong = tmp_path / "twice.yaml"
        wrong.write_text(text)
        return CliRunner().invoke(app, ["check", str(wrong)]).stderr.removeprefix(str(wrong))

    merged = "x: &common {name: a}\napplications:\n- <<: *common\n  name: b\n"
    assert "stands there" not in told(merged), "what is merged may be overridden"
    assert told(merged + "  name: c\n") == " cannot be read: line 5: the key 'name' stands there twice\n"
    service: dict[str, Any] = {"kind": "RayService", "spec": {"serveConfigV2": "applications: []\napplications: []\n"}}
    said = ": serveConfigV2 cannot be read: line 2: the key 'applications' stands there twice\n"
    assert told(yaml.safe_dump(service)) == said
    service["spec"]["serveConfigV2"] = "applications: []\n---\napplications: []\n"
    assert told(yaml.safe_dump(service)) == ": serveConfigV2 holds several documents: leave out the ---\n"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*APP, "args", "model"), "smollm2-360m-instruct"),
        ((*APP, "args", "model"), "smollm2-135m-instruct-ft"),
        ((*APP, "args", "adapter"), "none-yet"),
        ((*APP, "runtime_env"), {"nsight": "default"}),
        ((*APP, "runtime_env"), {"plugin_of_ours": {"a": 1}, "env_vars": None}),
    ],
)
def test_what_may_be_meant_as_it_is_is_left_alone(place: tuple[Any, ...], value: Any) -> None:
    assert list(mistakes(spoiled(place, value))) == []


def test_every_file_is_read_whatever_is_wrong_with_another(tmp_path: Path) -> None:
    texts = {
        "kustomization": "kind: Kustomization\n",
        "two": "applications: []\n---\napplications: []\n",
        "empty": "applications: []\n---\n",
        "date": "a: 2024-13-45\n",
        "deep": "[" * 20_000,
        "none": "applications: []\n",
    }
    files = [tmp_path / f"{name}.yaml" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    told = CliRunner().invoke(app, ["check", *map(str, files)])
    assert told.exit_code == 1
    assert told.stderr.replace(f"{tmp_path}/", "").splitlines() == [
        "kustomization.yaml holds neither a Serve config (applications: …) nor a RayService",
        "two.yaml holds several documents, of which `serve deploy` reads none: leave out the ---",
        "empty.yaml holds several documents, of which `serve deploy` reads none: leave out the ---",
        "date.yaml cannot be read: month must be in 1..12",
        "deep.yaml cannot be read: it is nested too deeply",
        "none.yaml: applications: there are none: nothing would be served",
    ]


def test_the_playgrounds_builder_refuses_as_serve_shows_it() -> None:
    with pytest.raises(RayServeException, match=r"^unknown key 'tabs': there are max_ongoing_requests$"):
        build_playground({"tabs": 3})
