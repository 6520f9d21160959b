"""kv-connector config check: the files that it reads, and the faults that it finds."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from kv_connector.cli.main import app
from kv_connector.control.cluster_key import ClusterKey

run = partial(invoke, app)
ROOT = Path(__file__).parents[3]


def transfer(role: str = "kv_producer", **settings: Any) -> dict[str, Any]:
    return {"kv_connector": "WriteImmConnector", "kv_role": role, "kv_connector_extra_config": settings}


def vllm(role: str, port: int, options: str = "", **settings: Any) -> str:
    """Returns a command line that starts an engine."""
    config = json.dumps(transfer(role, **settings))
    return f"vllm serve MODEL --port {port} {options} --kv-transfer-config '{config}' &\n"


P = vllm("kv_producer", 8100, control_port=5600)
D = vllm("kv_consumer", 8200, control_port=5700)
ROUTER = "kv-connector router --prefill http://127.0.0.1:8100@127.0.0.1:5600 --decode http://127.0.0.1:8200"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KV_CONNECTOR_KEY_FILE", raising=False)


class Check:
    """Writes files and returns the faults that the command finds in them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, **files: str | dict[str, Any]) -> list[str]:
        """Writes the files, `p_json` as p.json. Returns the texts of all faults; the exit status must
        match."""
        findings = self.findings(**files)
        return [finding["words"] for finding in findings if finding["verdict"] == "FAIL"]

    def findings(self, **files: str | dict[str, Any]) -> list[dict[str, str]]:
        paths = []
        for name, content in files.items():
            paths.append(self._directory / name.replace("_", "."))
            paths[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        status, output = run("config", "check", *map(str, paths), "--json")
        findings: list[dict[str, str]] = json.loads(output)["findings"]
        wrong = any(finding["verdict"] == "FAIL" for finding in findings)
        assert status == (1 if wrong else 0)
        assert findings
        return findings


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


# --- The files that are read


def readme_commands(router: str) -> str:
    """The block of README.md that starts a router with this option."""
    blocks = re.findall(r"^(?:(?: {4}.*)?\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    (found,) = [block for block in blocks if f"kv-connector router {router}" in block]
    return found


def test_readme_commands_for_one_host_are_fine(check: Check) -> None:
    findings = check.findings(start_sh=readme_commands("--registration 127.0.0.1:8500"))
    assert [finding["verdict"] for finding in findings] == ["ok"] * 3


def test_readme_commands_for_two_hosts_are_fine(check: Check, tmp_path: Path) -> None:
    """Each command is a machine's."""
    key = tmp_path / "key"
    assert run("keygen", str(key))[0] == 0
    prefill, decode, router = (
        f"export KV_CONNECTOR_KEY_FILE={key}\n{command}"
        for command in readme_commands("--registration 10.0.0.9:8500").strip("\n").split("\n\n")
    )
    findings = check.findings(prefill_sh=prefill, decode_sh=decode, router_sh=router)
    assert [finding["verdict"] for finding in findings] == ["ok"] * 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p_json", json.dumps(transfer(control_prot=1))),
        ("p_yaml", "kv_connector: WriteImmConnector\nkv_role: kv_both\n"
         "kv_connector_extra_config: {control_prot: 1}"),
        ("p_yml", f"port: 8100\nkv-transfer-config: {json.dumps(transfer(control_prot=1))}"),
        ("p_yml", f"port: 8100\nkv_transfer_config: '{json.dumps(transfer(control_prot=1))}'"),
        ("bare_json", '{"control_port": 1, "control_prot": 1}'),
        ("sgl_env", '# of SGLang\nKV_CONNECTOR_SETTINGS={"control_prot": 1}\nOTHER=1'),
        ("sgl_env", "KV_CONNECTOR_SETTINGS='{\"control_prot\": 1}'"),
        ("start_sh", vllm("kv_producer", 8100, control_prot=1)),
        ("start_sh", 'S=\'{"control_prot": 1}\'\n' + "KV_CONNECTOR_SETTINGS=$S sglang serve --model-path M "
         "--disaggregation-mode prefill --disaggregation-transfer-backend write_imm"),
        ("start_sh", "set -e  # it's first\n# don't go on\n"
         "exec python -m vllm.entrypoints.openai.api_server --model M \\\n"
         f"  --kv-transfer-config='{json.dumps(transfer(control_prot=1), indent=1)}' >log 2>&1"),
        ("compose_yaml", json.dumps({"services": {"p": {"command": vllm("kv_both", 1, control_prot=1)}}})),
        ("pod_yaml", json.dumps({"spec": {"containers": [
            {"name": "p", "args": ["--kv-transfer-config", json.dumps(transfer(control_prot=1))]}]}})),
        ("pod_yaml", json.dumps({"spec": {"containers": [
            {"name": "p", "command": ["sh", "-c", vllm("kv_both", 1, control_prot=1)]}]}})),
        ("multi_json", json.dumps({"kv_connector": "MultiConnector", "kv_role": "kv_both",
         "kv_connector_extra_config": {"connectors": [{"kv_connector": "X"}, transfer(control_prot=1)]}})),
    ],
)  # fmt: skip
def test_a_misspelled_setting_is_found_whatever_it_stands_in(check: Check, name: str, content: str) -> None:
    (words,) = check(**{name: content})
    assert words.startswith("unknown field `control_prot`: did you mean `control_port`?")


def test_a_script_of_an_example_is_read_as_a_shell_would(check: Check) -> None:
    script = """
    P=${PREFILL_PORT:-8100} D=8200  # it's where they listen
    cat >config <<'END'
    it's no command: vllm serve --kv-transfer-config nonsense
    END
    vllm serve M --port "$P" "$@" >"$(mktemp)" 2>&1 --kv-transfer-config '{
      "kv_connector": "WriteImmConnector", "kv_role": "kv_producer",
      "kv_connector_extra_config": {"control_port": '$((P + 1))'}}' &
    if true; then vllm serve M --port $D --kv-transfer-config '{"kv_connector": "WriteImmConnector",
      "kv_role": "kv_consumer", "kv_connector_extra_config": {"control_port": '$((D + 1))'}}'; fi
    kv-connector router --prefill "http://127.0.0.1:$P@127.0.0.1:$((P + 1))" --decode http://127.0.0.1:$D 2>l
    """
    found = check.findings(start_sh=script)
    assert [finding["verdict"] for finding in found] == ["ok"] * 3
    assert "port 8101" in found[0]["words"]
    moved = check.findings(start_sh=script.replace('$((P + 1))" --decode', '$P" --decode'))
    assert "--prefill has the control socket at 127.0.0.1:8100" in moved[-1]["words"]


def test_variables_come_from_files_of_variables_too(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANE", raising=False)
    compose = json.dumps({"services": {"p": {"command": vllm("kv_both", 1, providers=["${LANE}"])}}})
    unknown, engine = check.findings(compose_yaml=compose)
    assert (unknown["verdict"], engine["verdict"]) == ("note", "ok")
    assert unknown["words"] == "${LANE} in --kv-transfer-config is not set here"
    (words,) = check(compose_yaml=compose.replace("providers", "provider"))
    assert words.startswith("unknown field `provider`"), "the rest is looked at"
    for line in ("vllm serve M --kv-transfer-config=$LANE", "kv-connector router --prefill $LANE"):
        assert [one["verdict"] for one in check.findings(start_sh=line)] == ["note"]
    assert check(compose_yaml=compose, cpu_env="LANE=tcp") == []
    (words,) = check(cpu_env="LANE=tpc", compose_yaml=compose)
    assert words.startswith("providers: this build has no lane 'tpc': did you mean `tcp`?")
    monkeypatch.setenv("LANE", "tcp")
    assert check(compose_yaml=compose) == []


@pytest.mark.parametrize("files", [["vllm/run"], ["compose/compose.yaml", "compose/cpu.env"]], ids=" ".join)
def test_the_examples_are_fine(files: list[str]) -> None:
    status, output = run("config", "check", *(str(ROOT / "examples" / file) for file in files), "--json")
    assert status == 0, output
    found = [one for one in json.loads(output)["findings"] if "not on this machine" not in one["words"]]
    assert [one["verdict"] for one in found] == ["ok"] * 3


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["config", "check", "-"], input=json.dumps(transfer(spin="x")))
    assert result.exit_code == 1
    assert "unknown field `spin`" in result.output


# Of 9 to the power of 11 nodes, and of as many merged keys.
ALIASES = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.txt", "hello", "has no engine,"),
        ("x.json", "{", "is not JSON"),
        ("x.yaml", "a: [", "is not YAML"),
        ("x.yaml", ALIASES, "its aliases expand to more than"),
        ("x.yaml", MERGES, "its aliases expand to more than"),
        ("x.yaml", "a: &a [*a]", "its aliases expand to more than"),
        ("x.yaml", "[" * 100_000, "nested too deeply"),
        ("x.json", "[" * 100_000, "nested too deeply"),
        ("x.sh", "echo 'open", "is not a shell script"),
        ("x.json", "[1]", "has no engine,"),
        ("x.yaml", "services: {p: {command: vllm 'serve}}", "is not a command: No closing quotation"),
    ],
)
def test_unreadable_file_is_wrong_usage(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    status, output = run("config", "check", str(tmp_path / name))
    assert status == 2
    assert words in " ".join(output.split())


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("verify_pages: true\ntrue: 1\n", 1, "unknown field `True`"),
        ("verify_pages: true\n1: 1\n", 1, "unknown field `1`"),
        ("services: {p: {command: vllm serve M, environment: 4}}", 2, "has no engine,"),
        ("services: {p: {command: vllm serve M, environment: true}}", 2, "has no engine,"),
    ],
)
def test_a_value_of_another_type_is_an_error_and_no_traceback(
    tmp_path: Path, content: str, status: int, words: str
) -> None:
    (tmp_path / "x.yaml").write_text(content)
    code, output = run("config", "check", str(tmp_path / "x.yaml"))
    assert code == status, output
    assert words in " ".join(output.split())


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    status, output = run("config", "check", str(tmp_path / "none"))
    assert status == 2
    assert "cannot read" in output


# --- One engine


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transfer(control_port="5600"), "Expected `int`, got `str` - at `$.control_port`"),
        (transfer() | {"kv_connector": "WriteImConnector"}, "Set 'WriteImmConnector'"),
        (transfer("producer"), "Set kv_producer (prefill), kv_consumer (decode) or kv_both"),
        (transfer() | {"control_port": 1}, "control_port is a setting of kv_connector_extra_config"),
        (transfer() | {"kv_rol": "x"}, "unknown field `kv_rol`: did you mean `kv_role`?"),
        (transfer() | {"kv_load_failure_policy": "retry"}, "Set fail or recompute"),
        (transfer() | {"kv_connector_extra_config": []}, "kv_connector_extra_config must be an object"),
        ({"kv_connector": "MultiConnector", "kv_role": "kv_both"}, "among the connectors of MultiConnector"),
        *(
            (
                {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"connectors": connectors},
                },
                "among the connectors of MultiConnector",
            )
            for connectors in (None, 3, "x")
        ),
        (transfer(control_host="10.0.0.1"), "no cluster key is set"),
        (transfer(providers=["tpc"]), "this build has no lane 'tpc': did you mean `tcp`?"),
        (transfer(providers=["host", "nvlink"]), "Leave out the lanes"),
        (transfer(routers=["127.0.0.1:8500"]), "routers needs api_url"),
        (transfer(routers=["127.0.0.1:8500"], api_url="10.0.0.1:8100"), "must look like http://host:port"),
        (
            transfer(routers=["10.0.0.9:8500"], api_url="http://127.0.0.1:8100"),
            "a router at 10.0.0.9:8500 cannot reach",
        ),
        (transfer(nics=[["a"], ["b"]]), "nics has 2 entries, and this engine has 1 ranks"),
    ],
)
def test_problem_of_an_engine_is_found(check: Check, config: dict[str, Any], words: str) -> None:
    (found,) = check(p_json=config)
    assert words in found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (vllm("kv_both", 5601, "-tp 2"), "port 5601 is used twice"),
        (
            vllm("kv_both", 8100, "-tp 2", worker_cpu=[1]),
            "worker_cpu has 1 entries, and this engine has 2 ranks",
        ),
        (vllm("kv_both", 8100, "-dp 4", control_port=65533), "control_port 65533 leaves no port for rank 0"),
        ("vllm serve M --kv-transfer-config '{'", "--kv-transfer-config: "),
        ("vllm serve M --kv-transfer-config '[1]'", "it must be a JSON object"),
        ("sglang serve --disaggregation-mode decode", "Set write_imm"),
        (
            "sglang serve --disaggregation-mode prefil --disaggregation-transfer-backend write_imm",
            "Set prefill or decode",
        ),
        (
            "KV_CONNECTOR_SETTINGS=[] sglang serve --disaggregation-mode decode "
            "--disaggregation-transfer-backend write_imm",
            "must be a JSON object",
        ),
        ("export KV_CONNECTOR_KEYFILE=key\n" + P, "unknown variable `KV_CONNECTOR_KEYFILE`: did you mean"),
    ],
)
def test_problem_of_a_server_is_found(check: Check, line: str, words: str) -> None:
    (found,) = check(start_sh=line)
    assert words in found


def test_existing_key_file_is_checked(check: Check, tmp_path: Path) -> None:
    key = tmp_path / "key"
    config = transfer(control_host="10.0.0.1", control_key_file=str(key))
    assert check(p_json=config) == []
    assert any("not on this machine" in finding["words"] for finding in check.findings(p_json=config))
    ClusterKey.generate().write(key)
    assert check(p_json=config) == []
    key.chmod(0o644)
    (words,) = check(p_json=config)
    assert "chmod 600" in words


# --- One router


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--prefill 127.0.0.1:8100 --decode http://h:1", "must look like http://host:port"),
        ("--prefill http://h:1", "at least one --prefill and one --decode"),
        ("--registration 10.0.0.9:8500", "could register as an engine and receive prompts"),
        ("--registration 127.0.0.1", "must be host:port"),
        ("--prefil http://h:1", "No such option: --prefil"),
        ("--registration 127.0.0.1:8500 --port 99999", "65535"),
    ],
)
def test_problem_of_a_router_is_found(check: Check, arguments: str, words: str) -> None:
    (found,) = check(start_sh=f"kv-connector router {arguments}")
    assert words in found


CERTIFICATES = ROOT / "tests" / "support" / "certificates"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--api-key-file", "line 1 of the key file"),
        ("--engine-key-file", "must hold one key"),
        ("--engine-ca", "Change --engine-ca"),
        ("--ssl-certfile", "Change --ssl-certfile or --ssl-keyfile"),
    ],
)
def test_existing_file_of_a_router_is_checked(check: Check, tmp_path: Path, option: str, words: str) -> None:
    file = tmp_path / "file"
    started = {"start_sh": f"{ROUTER} {option} {file}"}
    assert check(**started) == []
    assert any(f"file {file} is not on this machine" in one["words"] for one in check.findings(**started))
    file.write_text("not a key")
    file.chmod(0o600)
    (found,) = check(**started)
    assert words in found


def test_sound_files_of_a_router_are_fine(check: Check, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {'a' * 16}\n")
    (tmp_path / "keys").chmod(0o600)
    server, authority = (CERTIFICATES / name for name in ("server.pem", "authority.pem"))
    options = f"--api-key-file {tmp_path / 'keys'} --engine-ca {authority} --ssl-certfile {server}"
    (finding,) = check.findings(start_sh=f"{ROUTER} {options} --ssl-keyfile {server}")
    assert finding["verdict"] == "ok"
    (missing,) = check.findings(start_sh=f"{ROUTER} {options} --ssl-keyfile {tmp_path / 'none'}")[:-1]
    assert (missing["verdict"], "none is not on this machine" in missing["words"]) == ("note", True)


@pytest.mark.parametrize(
    "option", ["--config", "--key-file", "--api-key-file", "--engine-ca", "--ssl-certfile"]
)
def test_file_that_cannot_be_looked_for_is_reported(check: Check, option: str) -> None:
    """A directory that the user may not enter is like a name that is too long, and root may enter any."""
    (found,) = check(start_sh=f"{ROUTER} {option} /{'k' * 300}")
    assert "cannot read" in found
    assert "File name too long" in found


# --- Several


def of_model(model: str, engine: str) -> str:
    return engine.replace("MODEL", model)


def test_engines_of_two_models_behind_one_router_are_no_conflict(check: Check) -> None:
    p, d = vllm("kv_producer", 8300, control_port=5620), vllm("kv_consumer", 8400, control_port=5630)
    pair = of_model("A", P) + of_model("A", D)
    lists = "--prefill http://127.0.0.1:8300@127.0.0.1:5620 --decode http://127.0.0.1:8400"
    assert check(start_sh=pair + of_model("B", p) + of_model("B", d) + f"{ROUTER} {lists}") == []
    found = check(start_sh=pair + of_model("B", p))
    assert found == ["model is B at the prefill engine and A at the decode engine"]


def test_two_models_under_one_name_are_a_conflict(check: Check) -> None:
    """The router would send the pages of model A to engines of model B."""
    p, d = vllm("kv_producer", 8300, control_port=5620), vllm("kv_consumer", 8400, control_port=5630)
    four = of_model("A", P) + of_model("A", D) + of_model("B", p) + of_model("B", d)
    found = check(start_sh=four.replace("--port", "--served-model-name m --port"))
    assert sorted(found) == [
        "model is A at the prefill engine and B at the decode engine",
        "model is B at the prefill engine and A at the decode engine",
    ]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (P + vllm("kv_consumer", 8200, control_port=5600), "port 5600 is used twice"),
        (P + f"{ROUTER} --admin 127.0.0.1:5600", "a control socket and the admin address"),
        (
            f"{ROUTER} --registration 127.0.0.1:9000 --admin 127.0.0.1:9000",
            "the registration and the admin address",
        ),
        (vllm("kv_producer", 8100, "-tp 2") + vllm("kv_consumer", 8200, control_port=5601), "port 5601"),
        (P + vllm("kv_consumer", 8100, control_port=5700), "port 8100 is used twice"),
        (P + D + ROUTER + " --port 8200", "port 8200 is used twice, by the API server and the router"),
        (P + D.replace("MODEL", "OTHER"), "model is MODEL at the prefill engine and OTHER"),
        (P + vllm("kv_consumer", 8200, "--kv-cache-dtype fp8", control_port=5700), "not set at the prefill"),
        (
            vllm("kv_producer", 8100, providers=["host"])
            + vllm("kv_consumer", 8200, control_port=1, providers=["tcp"]),
            "no common lane: the prefill engine has host, the decode engine tcp",
        ),
        (P + vllm("kv_consumer", 8200, control_port=5700, control_key_file="key"), "has a cluster key"),
        (
            P
            + vllm("kv_consumer", 8200, control_port=1, control_host="10.0.0.2", allow_unauthenticated=True),
            "the decode engine at 10.0.0.2 cannot reach the prefill engine at 127.0.0.1",
        ),
        (P + D + ROUTER.replace("5600", "5601"), "--prefill has the control socket at 127.0.0.1:5601"),
        (P + D + ROUTER.replace("8200", "8201"), "no --decode has port 8200"),
        (
            vllm("kv_both", 8100, control_port=5600) + D + ROUTER.replace("8100", "8101"),
            "no --prefill or --decode has port 8100",
        ),
        (
            vllm("kv_both", 8100, routers=["127.0.0.1:8500"], api_url="http://127.0.0.1:8100")
            + "kv-connector router --registration 127.0.0.1:8501",
            "the engine registers at 127.0.0.1:8500, but the router listens at 127.0.0.1:8501",
        ),
        (
            vllm("kv_both", 8100, routers=["127.0.0.1:8500"], api_url="http://127.0.0.1:8100")
            + ROUTER.replace("8200", "8100"),
            "needs the router's --registration",
        ),
        (
            vllm("kv_both", 8100, routers=["127.0.0.1:8500"], api_url="http://127.0.0.1:8100")
            + "kv-connector router --registration 127.0.0.1:8500 --key-file key",
            "only the router has a cluster key",
        ),
        (
            P + "sglang serve --model-path MODEL --port 1 --disaggregation-mode decode "
            "--disaggregation-transfer-backend write_imm",
            "the prefill engine is vLLM, the decode engine SGLang",
        ),
        (
            "sglang serve --disaggregation-mode prefill --disaggregation-transfer-backend write_imm &\n"
            + ROUTER,
            "SGLang has its own",
        ),
    ],
)  # fmt: skip
def test_conflict_between_parts_is_found(check: Check, script: str, words: str) -> None:
    found = check(start_sh=script)
    assert [one for one in found if words in one], found


def test_engines_of_both_roles_may_be_listed_for_one_of_them(check: Check) -> None:
    both = P.replace("kv_producer", "kv_both") + D.replace("kv_consumer", "kv_both")
    assert check(start_sh=both + ROUTER) == []


def test_prefill_and_decode_may_be_two_files(check: Check) -> None:
    p, d = transfer(), transfer("kv_consumer")
    (words,) = check(p_json=p, d_json=d)
    assert "port 5600" in words, "both are at 127.0.0.1, so on one machine"
    key = {"control_key_file": "key"}
    assert check(p_json=transfer(**key), d_json=transfer("kv_consumer", **key)) == [], (
        "on two, for all we know"
    )
    (words,) = check(p_json=p, d_json=transfer(control_port=5700))
    assert "all are prefill engines" in words


@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_engines_of_one_role_in_one_file_get_a_note(check: Check, role: str, other: str) -> None:
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    first, second = vllm(kv_role, 8100, control_port=5600), vllm(kv_role, 8101, control_port=5601)
    findings = check.findings(start_sh=first + second)
    (note,) = [finding for finding in findings if f"all are {role} engines" in finding["words"]]
    assert note["verdict"] == "note"
    assert f"If the {other} engines have files of their own" in note["words"]
    (words,) = check(first_sh=first, second_sh=second)
    assert f"all are {role} engines" in words


def test_containers_have_ports_and_loopback_to_themselves(check: Check) -> None:
    services = {"p": {"command": P}, "d": {"command": D.replace("8200", "8100").replace("5700", "5600")}}
    (words,) = check(compose_yaml=json.dumps({"services": services}))
    assert "the decode engine from another container cannot reach" in words
    for service in services.values():
        service["network_mode"] = "host"
    assert len([one for one in check(compose_yaml=json.dumps({"services": services})) if "port" in one]) == 2


def test_value_that_one_side_leaves_to_the_model_is_no_contradiction(check: Check) -> None:
    assert check(start_sh=P + vllm("kv_consumer", 8200, "--dtype bfloat16", control_port=5700)) == []
    both = [
        vllm("kv_producer", 8100, "--dtype float16"),
        vllm("kv_consumer", 8200, "--dtype bfloat16", control_port=1),
    ]
    assert check(start_sh="".join(both)) == [
        "--dtype is float16 at the prefill engine and bfloat16 at the decode engine"
    ]


def test_each_pod_has_its_ports(check: Check) -> None:
    def pod(name: str, role: str, *more: dict[str, Any]) -> str:
        config = transfer(role, control_host="$(POD_IP)", api_url="http://$(POD_IP):8000", routers=["r:8500"])
        container = {
            "name": "vllm",
            "args": ["--kv-transfer-config", json.dumps(config)],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "KV_CONNECTOR_KEY_FILE", "value": "/key/key"},
            ],
        }
        template = {"spec": {"containers": [container, *more]}}
        return json.dumps({"kind": "Deployment", "metadata": {"name": name}, "spec": {"template": template}})

    router = {
        "name": "router",
        "command": ["kv-connector", "router"],
        "args": ["--registration", "0.0.0.0:5600", "--key-file=k"],
    }
    two = [pod("p", "kv_producer"), pod("d", "kv_consumer")]
    found = check.findings(pods_yaml="\n---\n".join(two))
    assert {one["verdict"] for one in found} == {"note", "ok"}
    assert {one["subject"].rpartition(": ")[2] for one in found} == {"p vllm", "d vllm"}
    assert check(p_yaml=two[0], d_yaml=two[1]) == [], "in two files"
    assert check(pods_yaml={"kind": "List", "items": [json.loads(one) for one in two]}) == []
    words = check(pods_yaml=pod("p", "kv_both", router))
    assert any("port 5600 is used twice, by a control socket and the registration" in one for one in words)


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_an_address_known_at_run_time_hides_nothing_else(check: Check, framework: str) -> None:
    settings: dict[str, Any] = {"control_host": "$(POD_IP)", "nics": [["a"], ["b"]]}
    container: dict[str, Any] = {
        "command": [framework, "serve"],
        "args": ["--disaggregation-mode=prefill", "--disaggregation-transfer-backend=write_imm"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KV_CONNECTOR_SETTINGS", "value": json.dumps(settings)},
        ],
    }
    if framework == "vllm":
        container["args"] = ["--kv-transfer-config", json.dumps(transfer(**settings))]
    (words,) = check(pod_yaml={"spec": {"containers": [container]}})
    assert "nics has 2 entries" in words


def test_addresses_known_at_run_time_are_one_only_on_one_machine(check: Check) -> None:
    host = {"control_host": "${ENGINE_HOST}", "control_key_file": "key"}
    p, d = vllm("kv_producer", 8100, **host), vllm("kv_consumer", 8200, **host)
    assert check(p_sh=p, d_sh=d) == []
    (words,) = check(start_sh=p + d)
    assert "port 5600" in words
    (words,) = check(start_sh=vllm("kv_both", 5600, "--host 10.0.0.1", **host))
    assert "port 5600" in words, "it may be that one"


def test_a_drafter_on_one_side_is_a_note(check: Check) -> None:
    found = check.findings(
        start_sh=P + vllm("kv_consumer", 8200, "--speculative-config {}", control_port=5700)
    )
    assert [one["verdict"] for one in found] == ["ok", "ok", "note"]
    assert "--speculative-config" in found[-1]["words"]
