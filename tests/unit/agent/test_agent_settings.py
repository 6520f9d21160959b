"""The settings of an operator, and the values computed from them."""

from pathlib import Path
from typing import Any

import pytest

from kv_connector.agent.settings import AgentSettings, SettingsError, examine_settings, parse_settings
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts


def test_nothing_has_to_be_set() -> None:
    settings = parse_settings({})
    assert settings.key() is None
    assert settings.host("10.0.0.5", None) == "127.0.0.1", "strangers are not let in unasked"
    assert settings == AgentSettings()
    assert settings.control_port == 5600
    assert settings.for_device("cpu").providers == ("host", "tcp")
    assert settings.for_device("cuda").providers == ("nvlink",)
    assert not settings.allow_fallback
    assert settings.agent_timeouts() == Timeouts()


@pytest.mark.parametrize(
    ("device", "providers", "wrong", "advice"),
    [
        ("cuda", ["nvlink", "tcp"], "tcp cannot move a KV cache in a GPU's memory", "nvlink"),
        ("cuda", ["host"], "host cannot move a KV cache in a GPU's memory", "bounce"),
        ("cpu", ["nvlink", "host"], "nvlink cannot move a KV cache in CPU memory", "host"),
    ],
)
def test_a_lane_for_the_other_kind_of_memory_is_refused(
    device: str, providers: list[str], wrong: str, advice: str
) -> None:
    settings = parse_settings({"providers": providers})
    with pytest.raises(SettingsError, match=wrong) as refused:
        settings.for_device(device)
    assert advice in str(refused.value)


def test_lanes_for_either_kind_of_memory_are_kept() -> None:
    assert parse_settings({"providers": ["verbs"]}).for_device("cuda").providers == ("verbs",)


def test_everything_can_be_set() -> None:
    settings = parse_settings(
        {
            "control_host": "10.0.0.7",
            "control_port": 6000,
            "providers": ["tcp"],
            "allow_fallback": True,
            "data_host": "10.1.0.7",
            "spin_us": 5,
            "timeouts": {"hold": 30, "dead": 2.5},
            "allow_unauthenticated": True,
            "control_key_file": "key",
            "routers": ["10.0.0.1:8500", "[fd00::1]:8500"],
            "api_url": "http://10.0.0.7:8100",
        }
    )
    assert settings.router_addresses() == (Address("10.0.0.1", 8500), Address("fd00::1", 8500))
    assert settings.providers == ("tcp",)
    assert settings.agent_timeouts() == Timeouts(hold=30, dead=2.5)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"contol_port": 1},
            "unknown field `contol_port`: did you mean `control_port`",
        ),
        ({"colour": 1}, "unknown field `colour`. Valid: control_host, control_port"),
        ({"control_port": "5600"}, r"Expected `int`, got `str` - at `\$.control_port`"),
        ({"control_port": 70000}, "control_port"),
        ({"providers": []}, "providers"),
        ({"providers": "tcp"}, "Expected `array`"),
        ({"allow_fallback": 1}, "Expected `bool`"),
        ({"timeouts": {"hold": "30"}}, "Expected `float`"),
        ({"timeouts": {"hold": 0}}, "> 0"),
        (
            {"timeouts": {"hodl": 30}},
            "unknown timeouts hodl: did you mean `hold`",
        ),
        ({"control_host": "0.0.0.0"}, "control_host '0.0.0.0' is not an address that a peer can dial"),
        ({"control_host": ""}, "control_host '' is not an address"),
        ({"control_host": "*"}, "is not an address"),
        ({"control_host": "localhost"}, "'localhost' is a name. Write an interface's numeric IP address"),
        ({"data_host": "node-7.cluster"}, "data_host 'node-7.cluster' is a name"),
        ({"data_host": "::"}, "data_host '::' is not an address"),
        ({"routers": ["10.0.0.1"], "api_url": "http://h:1"}, "routers: '10.0.0.1' must be host:port"),
        ({"routers": ["10.0.0.1:8500"]}, "routers needs api_url"),
    ],
)
def test_unusable_setting_is_named(extra: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        parse_settings(extra)


def test_every_problem_is_found_and_the_rest_is_usable() -> None:
    settings, problems = examine_settings(
        {"spin": 1, "timeouts": {"hodl": 1}, "control_port": 6000, "routers": 1}
    )
    assert [problem.partition(":")[0] for problem in problems] == [
        "unknown field `spin`",
        "unknown timeouts hodl",
        "Expected `array`, got `int` - at `$.routers`",
    ]
    assert settings == AgentSettings(control_port=6000)


def test_strangers_are_let_in_only_on_demand(tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.write(tmp_path / "key")
    reachable = parse_settings({"control_host": "10.0.0.7"})
    with pytest.raises(SettingsError, match=r"kv-connector keygen .*allow_unauthenticated"):
        reachable.host("10.0.0.5", None)
    assert reachable.host("10.0.0.5", key) == "10.0.0.7"
    assert parse_settings({}).host("10.0.0.5", key) == "10.0.0.5"
    with pytest.raises(SettingsError, match=r"VLLM_HOST_IP.* 'node-7' is a name"):
        parse_settings({}).host("node-7", key)
    assert parse_settings({"control_host": "fe80::1%eth0"}).host("10.0.0.5", key) == "fe80::1%eth0"
    assert parse_settings({"control_host": "127.0.0.2"}).host("10.0.0.5", None) == "127.0.0.2"
    unsafe = parse_settings({"control_host": "10.0.0.7", "allow_unauthenticated": True})
    assert unsafe.host("10.0.0.5", None) == "10.0.0.7"
    assert parse_settings({"control_key_file": str(tmp_path / "key")}).key() == key
    with pytest.raises(SettingsError, match="control_key_file: there is no key file"):
        parse_settings({"control_key_file": str(tmp_path / "none")}).key()


def test_each_rank_has_its_port() -> None:
    settings = AgentSettings(control_port=5600)
    ports = [
        settings.port(data_parallel_index=index, ranks=2, rank=rank)
        for index in range(3)
        for rank in range(2)
    ]
    assert ports == list(range(5600, 5606))


def test_a_port_of_the_kernels_choice_is_one_for_each_rank() -> None:
    assert [
        AgentSettings(control_port=0).port(data_parallel_index=0, ranks=2, rank=rank) for rank in (0, 1)
    ] == [
        0,
        0,
    ]


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"leaves no port for rank 1 .* 65536"):
        AgentSettings(control_port=65535).port(data_parallel_index=0, ranks=2, rank=1)


@pytest.mark.parametrize(
    ("extra", "words"),
    [({"worker_cpu": [1, 2, 3]}, "worker_cpu has 3 entries"), ({"nics": [["mlx5_0"]]}, "nics has 1 entries")],
)
def test_a_list_needs_an_entry_for_each_rank(extra: dict[str, Any], words: str) -> None:
    settings = parse_settings(extra)
    with pytest.raises(SettingsError, match=words):
        settings.check_ranks(2)


def test_each_rank_has_its_core_and_its_nics() -> None:
    settings = parse_settings({"worker_cpu": [3, 5], "nics": [["mlx5_8"], ["mlx5_9", "mlx5_1"]]})
    assert (settings.worker_cpu_of(1), settings.nics_of(1)) == (5, ("mlx5_9", "mlx5_1"))
    assert (AgentSettings().worker_cpu_of(1), AgentSettings().nics_of(1)) == ("auto", ())


@pytest.mark.parametrize("worker_cpu", ["core 3", [-1], 3])
def test_a_wrong_core_is_refused(worker_cpu: object) -> None:
    with pytest.raises(SettingsError, match="worker_cpu"):
        parse_settings({"worker_cpu": worker_cpu})
