"""The files that deploy a server: they parse, name what is there, agree with each other, and hold no key."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import polars as pl
import pytest
import yaml

from export.models import ALONE, build
from serve.server import running
from urank.cli import load_command
from urank.cli.serve import serve_command
from urank.learning.features import Featurizer
from urank.model_io import save_model
from urank.ranking.ranking_settings import UrankConfig
from urank.serve.feedback_export import export_feedback
from urank.serve.processes import GRACE_SECONDS
from urank.serve.security import OPEN_PATHS
from urank.serve.server_settings import KEY_VARIABLE, Limits

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deploy.md"
PORT = 8000
UID = 10001


def dockerfile() -> list[tuple[str, str]]:
    """The instructions, continued lines joined, without comments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of_kind(kind: str) -> list[str]:
    return [rest for name, rest in dockerfile() if name == kind]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def kubernetes() -> dict[str, dict[str, Any]]:
    """Each resource by its kind; the two services by their names."""
    found = [each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each is not None]
    named = {each["metadata"]["name"] if each["kind"] == "Service" else each["kind"]: each for each in found}
    assert len(named) == len(found)
    return named


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = kubernetes()["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((DEPLOY / "urank.service").read_text())
    return parser


def nginx() -> str:
    return re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())


def commands() -> dict[str, list[str]]:
    """What each file has `urank` do."""
    executable, *started = shlex.split(unit()["Service"]["ExecStart"])
    assert PurePosixPath(executable).name == "urank"
    return {
        "Dockerfile": json.loads(of_kind("CMD")[-1]),
        "compose": compose()["services"]["urank"]["command"],
        "kubernetes": container()["args"],
        "systemd": started,
    }


each_file = pytest.mark.parametrize("file", ["Dockerfile", "compose", "kubernetes", "systemd"])


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line, as `urank serve` takes them."""
    assert arguments[0] == "serve"
    command = load_command("serve")
    found: dict[str, Any] = command.make_context("serve", arguments[1:]).params
    return found


# Options


@each_file
def test_the_command_is_one_that_urank_takes(file: str) -> None:
    options = parsed(commands()[file])
    assert options["port"] == PORT
    assert options["log"] is not None
    assert options["key_file"] is not None
    assert PurePosixPath(options["model"]).name == "current"


def test_every_option_in_words_exists() -> None:
    """Also those that the documentation and comments speak of, beside those of the tools that they are for."""
    others = {"--read-only", "--tmpfs", "--cap-drop", "--security-opt", "--rm", "--build", "--build-arg", "--now"}
    others |= {"--from-file", "--overwrite", "--exclude", "--with", "--only", "--help"}
    command = load_command("serve")
    known = {name for parameter in command.params for name in parameter.opts}
    texts = [DEPLOY / "urank.service", DEPLOY / "nginx.conf", DEPLOY / "compose.yaml", DEPLOY / "kubernetes.yaml"]
    for path in [*texts, PAGE]:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
        assert named - known - others == set(), path.name
    assert serve_command.__name__ == "serve_command"
    assert {"--host", "--key-file", "--log", "--workers"} <= known


def test_everybody_can_reach_only_what_has_a_key() -> None:
    for file, arguments in commands().items():
        options = parsed(arguments)
        assert options["host"] == ("127.0.0.1" if file == "systemd" else "0.0.0.0"), file  # noqa: S104
        assert options["key_file"], file
    assert compose()["services"]["urank"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


# Ports, paths, users


def test_ports_agree() -> None:
    assert of_kind("EXPOSE") == [str(PORT)]
    assert container()["ports"] == [{"name": "http", "containerPort": PORT}]
    for name in ("urank", "urank-replicas"):
        assert kubernetes()[name]["spec"]["ports"] == [{"name": "http", "port": PORT, "targetPort": "http"}]
    assert re.findall(r"server (127\.0\.0\.1:\d+);", nginx()) == [f"127.0.0.1:{PORT}"]


def within(path: str | Path, mount: str) -> bool:
    return PurePosixPath(mount) in [PurePosixPath(path), *PurePosixPath(path).parents]


def test_paths_of_the_image_are_there() -> None:
    (last,) = [rest for name, rest in dockerfile() if name == "RUN" and "useradd" in rest]
    options = parsed(commands()["Dockerfile"])
    assert f"install --directory --owner=urank --group=urank --mode=0700 {options['log']}" in last
    assert re.search(rf"install --directory {PurePosixPath(options['model']).parent}\b", last)


def test_paths_of_compose_are_mounted() -> None:
    service, options = compose()["services"]["urank"], parsed(commands()["compose"])
    mounts = {parts[1]: parts for parts in (volume.split(":") for volume in service["volumes"])}
    model = PurePosixPath(options["model"])
    assert str(model.parent) in mounts  # the folder around it, see the comment there
    assert mounts[str(model.parent)][2] == "ro"
    assert mounts[str(options["log"])][0] in compose()["volumes"]
    assert str(options["key_file"]) == f"/run/secrets/{service['secrets'][0]}"
    assert service["secrets"][0] in compose()["secrets"]
    assert [entry.partition(":")[0] for entry in service["tmpfs"]] == ["/tmp"]  # noqa: S108
    assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").is_file()


def test_paths_of_kubernetes_are_mounted() -> None:
    options = parsed(commands()["kubernetes"])
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in kubernetes()["StatefulSet"]["spec"]["volumeClaimTemplates"]]
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == {*claims, *volumes}
    assert mounts[str(PurePosixPath(options["model"]).parent)]["readOnly"]
    assert mounts[str(options["log"])]["name"] in claims
    secret = volumes[mounts[str(PurePosixPath(options["key_file"]).parent)]["name"]]["secret"]
    assert secret["defaultMode"] == 0o440
    head = (DEPLOY / "kubernetes.yaml").read_text().split("---")[0]
    assert f"secret generic {secret['secretName']} --from-file={PurePosixPath(options['key_file']).name}=" in head
    assert volumes[mounts["/tmp"]["name"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108


def test_paths_of_systemd_are_given() -> None:
    service, options = unit()["Service"], parsed(commands()["systemd"])
    assert str(options["log"]) == f"%S/{service['StateDirectory']}"
    name, _, source = service["LoadCredential"].partition(":")
    assert str(options["key_file"]) == f"%d/{name}"
    assert source == "/etc/urank/key"
    assert within(options["model"], "/srv/urank")


def test_nothing_runs_as_root() -> None:
    stages = [index for index, (name, _) in enumerate(dockerfile()) if name == "FROM"]
    last = dockerfile()[stages[-1] :]
    names = [name for name, _ in last]
    assert [rest for name, rest in last if name == "USER"] == [f"{UID}:{UID}"]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    assert compose()["services"]["urank"]["user"] == f"{UID}:{UID}"
    context = pod()["securityContext"]
    assert context["runAsNonRoot"] is True
    assert [context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [UID] * 3
    assert unit()["Service"]["DynamicUser"] == "yes"


def test_nothing_may_do_more_than_it_must() -> None:
    service = compose()["services"]["urank"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    context = container()["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False
    assert set(container()["resources"]) == {"requests", "limits"}
    hardened = unit()["Service"]
    assert hardened["ProtectSystem"] == "strict"
    assert hardened["CapabilityBoundingSet"] == hardened["AmbientCapabilities"] == ""
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces"):
        assert hardened[name] == "yes", name


# Keys


def test_no_key_in_clear() -> None:
    assert "Secret" not in kubernetes()
    assert "environment" not in compose()["services"]["urank"]
    assert "env" not in container()
    texts = [ROOT / "Dockerfile", ROOT / ".dockerignore", *DEPLOY.iterdir()]
    for path in texts:
        text = path.read_text(encoding="utf-8")
        assert KEY_VARIABLE not in text, path.name
        assert not re.search(r"(?i)bearer\s+\w|x-api-key:\s*\w", text), path.name
    assert not (DEPLOY / compose()["secrets"]["urank_key"]["file"]).exists()


def test_what_goes_into_the_image() -> None:
    """The context is closed but for what the Dockerfile copies: no key, model or log slips in."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = [source for rest in of_kind("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert sorted(copied) == sorted(allowed)
    for name in copied:
        assert (ROOT / name).exists(), name
    assert not any(fnmatch(name, pattern) for name in copied for pattern in lines[1:] if not pattern.startswith("!"))


def test_both_stages_are_of_one_python_that_is_supported() -> None:
    assert of_kind("FROM") == ["python:${PYTHON} AS build", "python:${PYTHON}"]
    (version,) = [rest.partition("=")[2] for rest in of_kind("ARG") if rest.startswith("PYTHON=")]
    assert re.fullmatch(r"3\.\d+-slim-[a-z]+", version)
    assert tuple(map(int, version.split("-")[0].split("."))) >= (3, 11)
    assert json.loads(of_kind("ENTRYPOINT")[-1]) == ["urank"]
    assert any("--constraint constraints.txt" in rest for rest in of_kind("RUN"))


@pytest.mark.slow
def test_the_image_serves_without_torch(tmp_path: Path) -> None:
    """Its pip commands in a venv instead of an image, on the files of the build context."""
    for copied in (rest.split()[:-1] for rest in of_kind("COPY") if "--from" not in rest):
        for source in copied:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path)
    installed = tmp_path / "urank"
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", installed], check=True)
    for command in (rest for rest in of_kind("RUN") if rest.startswith("/opt/urank/bin/pip")):
        own = command.replace("/opt/urank", str(installed))
        subprocess.run([*shlex.split(own), "--quiet"], check=True, cwd=tmp_path, env=environment, timeout=300)
    python, absent = installed / "bin" / "python", ["torch", "safetensors", "sklearn", "matplotlib"]
    found = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    done = subprocess.run([python, "-c", found, *absent], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]"

    save_model(build(ALONE), UrankConfig(ranker="none"), tmp_path / "model")
    options = ("--log", tmp_path / "log")
    with (
        running(tmp_path / "model", *options, environment={"PYTHONPATH": ""}, python=python) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        event = {"ranking_id": ranked(tmp_path / "model", client), "item_id": "b"}
        client.post("/v1/feedback", json={"events": [event]}).raise_for_status()
    urank = installed / "bin" / "urank"
    subprocess.run([urank, "feedback", tmp_path / "log", "--quiet"], check=True, env=environment, timeout=60)
    assert pl.read_parquet(tmp_path / "log" / "log" / "*.parquet")["click"].sum() == 1
    train = [urank, "train", tmp_path / "log" / "log", "-o", tmp_path / "next"]
    refused = subprocess.run(train, capture_output=True, text=True, env=environment, timeout=60)
    assert refused.returncode == 2
    assert "this command needs torch, which is not installed" in " ".join(refused.stderr.split())


# Health, signals, times


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "model"
    save_model(build(ALONE), UrankConfig(ranker="none"), folder)
    return folder


@contextmanager
def served(saved: Path, log: Path, *options: str) -> Iterator[httpx.Client]:
    """A server with a key, and a client that has it."""
    key = "a-key-of-the-tests"
    (log.parent / "key").write_text(key)
    with (
        running(saved, "--log", log, "--key-file", log.parent / "key", *options) as (url, _),
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30) as client,
    ):
        yield client


@pytest.mark.slow
def test_probes_ask_for_what_is_there(saved: Path, tmp_path: Path) -> None:
    probes = {name: container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert probes["livenessProbe"]["path"] == "/healthz"  # a restart mends no full disk
    assert probes["readinessProbe"]["path"] == probes["startupProbe"]["path"] == "/readyz"
    ours = ("serve", "/model", "--host", "--port", "--log", "--key-file")
    options = [each for each in commands()["kubernetes"] if not each.startswith(ours)]
    assert options == ["--workers=2", "--no-playground"]
    with served(saved, tmp_path / "log", *options) as client:
        for path in {probe["path"] for probe in probes.values()}:
            assert path in OPEN_PATHS
            assert client.get(path, headers={"Authorization": ""}).status_code == 200
        for path in re.findall(r"location = (/\S+)", nginx()):
            assert client.get(path, headers={"Authorization": ""}).status_code in (401, 405), path


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that says this to `/healthz`, and 404 to all else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base has it
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("file", ["Dockerfile", "compose"])
def test_the_health_check_sees_what_there_is(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if file == "Dockerfile":
        (told,) = of_kind("HEALTHCHECK")
        program = json.loads(told.partition(" CMD ")[2])
    else:
        program = compose()["services"]["urank"]["healthcheck"]["test"][1:]
    assert program[:2] == ["python", "-c"]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked

    def healthy(port: int) -> bool:
        assert program[2].count(f":{PORT}/") == 1
        code = program[2].replace(f":{PORT}/", f":{port}/")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        return done.returncode == 0

    with answering(200) as port:
        assert healthy(port)
    assert not healthy(port)  # nobody is there any more
    with answering(503) as port:
        assert not healthy(port)


def test_nobody_is_killed_who_still_finishes() -> None:
    seconds = int(compose()["services"]["urank"]["stop_grace_period"].removesuffix("s"))
    assert seconds > GRACE_SECONDS + 10
    slept = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > GRACE_SECONDS + slept + 10
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > GRACE_SECONDS + 10
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert of_kind("STOPSIGNAL") == ["SIGTERM"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["Restart"] == "always"
    assert unit()["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_proxy_bounds_what_the_server_bounds() -> None:
    text, limits = nginx(), Limits()
    (size,) = re.findall(r"client_max_body_size\s+(\d+)m;", text)
    assert int(size) * 2**20 == limits.body_bytes
    (seconds,) = re.findall(r"proxy_read_timeout\s+(\d+)s;", text)
    assert int(seconds) > 2 * limits.seconds  # the server gives up first, and says so
    assert re.findall(r"proxy_set_header Host (\S+);", text) == ["localhost"]
    assert set(re.findall(r"location = (/\S+)", text)) == {"/metrics", "/v1/reload"}
    zones = re.findall(r"zone=(\w+):|shared:(\w+):", text)
    assert len(zones) == len({name for pair in zones for name in pair if name}) == 2  # one name for one use
    assert text.count("{") == text.count("}")


# Replicas


def test_the_parts_of_the_cluster_name_each_other() -> None:
    found = kubernetes()
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    for name in ("urank", "urank-replicas"):
        assert found[name]["spec"]["selector"] == labels
    assert found["StatefulSet"]["spec"]["serviceName"] == "urank-replicas"
    assert found["urank-replicas"]["spec"]["clusterIP"] == "None"
    assert pod()["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] < found["StatefulSet"]["spec"]["replicas"]


@pytest.mark.slow
def test_clicks_that_go_to_every_replica_count_once(saved: Path, tmp_path: Path) -> None:
    """One of the ways that docs/deploy.md tells: without joining the folders; a click elsewhere alone is not joined."""
    logs = [tmp_path / "0", tmp_path / "1"]
    with served(saved, logs[0]) as first, served(saved, logs[1]) as second:
        rankings = [ranked(saved, replica) for replica in (first, second)]
        for ranking in rankings:
            event = {"events": [{"ranking_id": ranking, "item_id": "b"}]}
            assert [replica.post("/v1/feedback", json=event).status_code for replica in (first, second)] == [202, 202]
        lost = {"events": [{"ranking_id": rankings[0], "item_id": "c"}]}
        assert second.post("/v1/feedback", json=lost).status_code == 202
    for log, ranking, unmatched in zip(logs, rankings, (1, 2), strict=True):
        done = export_feedback(log)
        assert done is not None
        assert (done.rankings, done.clicks, done.unmatched) == (1, 1, unmatched)
        rows = pl.concat([pl.read_parquet(path) for path in sorted((log / "log").glob("*.parquet"))])
        assert set(rows["session_id"]) == {ranking}
        assert rows.filter(pl.col("click") == 1)["item_id"].to_list() == ["b"]


@pytest.mark.slow
def test_a_click_at_the_wrong_replica_is_joined_when_the_folders_are_brought_together(
    saved: Path, tmp_path: Path
) -> None:
    """What docs/deploy.md advises: the servers make Parquet of their logs, and the folders are copied as it says."""
    logs = [tmp_path / "0", tmp_path / "1"]
    collected = [tmp_path / "collected" / log.name for log in logs]
    (copying,) = re.findall(r"sh -c '(cd /feedback && urank [^']+)'", PAGE.read_text(encoding="utf-8"))
    with served(saved, logs[0]) as first, served(saved, logs[1]) as second:
        rankings = [ranked(saved, replica) for replica in (first, second, first)]
        for replica, ranking, item in (
            (second, rankings[0], "a"),
            (first, rankings[1], "b"),
            (first, rankings[2], "c"),
        ):
            sent = {"events": [{"ranking_id": ranking, "item_id": item}]}
            assert replica.post("/v1/feedback", json=sent).status_code == 202
        for log, copy in zip(logs, collected, strict=True):  # while they run
            copy.mkdir(parents=True)
            local = copying.replace("/feedback", str(log)).replace("urank feed", f"{sys.executable} -m urank feed")
            shell = ["/bin/sh", "-c", local]
            archive = subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout
            with tarfile.open(fileobj=BytesIO(archive)) as file:
                file.extractall(copy, filter="data")

    def clicked(folders: list[Path]) -> set[tuple[str, str]]:
        rows = pl.concat([pl.read_parquet(path) for log in folders for path in (log / "log").glob("*.parquet")])
        assert rows.height == 3 * 3
        return set(rows.filter(pl.col("click") == 1).select("session_id", "item_id").iter_rows())

    for folders in (logs, collected):
        others = [part for log in folders for part in ("--with", str(log))]
        for log in folders:
            command = [sys.executable, "-m", "urank", "feedback", str(log), *others]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        assert clicked(folders) == set(zip(rankings, "abc", strict=True))


def ranked(saved: Path, replica: httpx.Client) -> str:
    """The id of a ranking of three items."""
    names = Featurizer.from_dict(json.loads((saved / "features.json").read_text())).names
    candidates = [{"item_id": item, "features": dict.fromkeys(names)} for item in "abc"]
    found: str = replica.post("/v1/rank", json={"query_id": "q", "candidates": candidates}).json()["ranking_id"]
    return found


# Words


def test_the_page_names_files_that_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "python -m benchmarks serve --only sizes" in text
    for name in set(re.findall(r"`((?:deploy/)[\w.]+|Dockerfile|constraints\.txt)`", text)):
        assert (ROOT / name).is_file(), name
    for name in set(re.findall(r"\]\((\w+\.md)\)", text)):
        assert (ROOT / "docs" / name).is_file(), name
    assert {path.name for path in DEPLOY.iterdir()} == {
        "compose.yaml",
        "kubernetes.yaml",
        "nginx.conf",
        "requirements.txt",
        "urank.service",
    }


@pytest.mark.slow
def test_the_page_scrapes_what_is_measured(saved: Path, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert job["dns_sd_configs"] == [{"names": ["urank-replicas"], "type": "A", "port": PORT}]
    with served(saved, tmp_path / "log") as client:
        client.get("/healthz")
        measured = client.get("/metrics").text
    for name in set(re.findall(r"`(urank_[a-z_]+)", text)) - {"urank_key"}:
        assert f"# TYPE {name} " in measured, name
