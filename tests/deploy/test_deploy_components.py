"""Components that are for some platforms only: rendered, strictly valid, and in agreement with the programs."""

import copy
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from target_service.settings import TargetSettings
from tests.support.manifest_checks import problems
from tests.support.manifests import (
    KUBERNETES,
    PROGRAMS,
    Document,
    compose,
    containers,
    environment,
    has_own_redis,
    named,
    of_kind,
    pod,
    read_settings,
    render,
    render_whole,
    title,
)

COMBINATIONS = [
    ("demo", ("routes",)),
    ("gpu-tls-autoscaling", ("routes", "redis/managed")),
    ("gpu", ("redis/sentinel",)),
    ("demo", ("tls", "redis/managed")),
    ("demo-tls-autoscaling", ("redis/sentinel", "monitoring")),
    ("gpu-tls-autoscaling", ("tensor-parallel",)),
]


@pytest.mark.parametrize(("overlay", "components"), COMBINATIONS)
def test_components_are_valid_and_agree(tmp_path: Path, overlay: str, components: tuple[str, ...]) -> None:
    documents = render_whole(compose(tmp_path, overlay, components))
    assert problems(documents) == []
    assert has_own_redis(documents) == (not any("redis" in name for name in components))


@pytest.mark.parametrize(("name", "kind", "num_replicas"), [("managed", "single", 0), ("sentinel", "sentinel", 2)])
def test_coordinators_ask_the_other_redis(tmp_path: Path, name: str, kind: str, num_replicas: int) -> None:
    documents = render_whole(compose(tmp_path, "demo-tls", (f"redis/{name}",)))
    coordinator = named(documents, "Deployment", "coordinator")
    (container,) = containers(coordinator)
    settings = read_settings(PROGRAMS["coordinator"], environment(container, documents), [])
    assert isinstance(settings, CoordinatorSettings)
    assert settings.store.startswith("rediss+sentinel://" if kind == "sentinel" else "rediss://")
    assert settings.store_replicas == num_replicas
    assert str(settings.store_password_file) == "/redis/password"
    volumes = {each["name"]: each for each in pod(coordinator)["volumes"]}
    assert volumes["redis"]["secret"]["secretName"] == "redis"
    assert not any(
        "redis" in title(each) for each in documents if each["kind"] in ("Service", "Certificate", "ConfigMap")
    )


def test_a_shared_model_has_a_gpu_for_each_process(tmp_path: Path) -> None:
    documents = render_whole(compose(tmp_path, "gpu", ("tensor-parallel",)))
    (container,) = containers(named(documents, "Deployment", "target"))
    settings = read_settings(PROGRAMS["target_service"], environment(container, documents), [])
    assert isinstance(settings, TargetSettings)
    assert settings.tensor_parallel == int(container["resources"]["limits"]["nvidia.com/gpu"]) == 2
    (draft,) = containers(named(documents, "Deployment", "draft"))
    assert draft["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_canary_is_a_target_beside_the_old_one() -> None:
    before, canary = render_whole(KUBERNETES / "overlays/gpu"), render(KUBERNETES / "canary")
    assert {title(each).rpartition("-")[0] for each in of_kind(canary, "ConfigMap")} == {"ConfigMap/target-canary"}
    others = {title(each) for each in canary if each["kind"] != "ConfigMap"}
    assert others == {"Deployment/target-canary", "PodDisruptionBudget/target-canary"}
    assert not {title(each) for each in before} & {title(each) for each in canary}, "deleting it would take these"
    assert problems([*before, *canary]) == []
    (container,) = containers(named(canary, "Deployment", "target-canary"))
    assert environment(container, canary)["SPECDEC_MODEL"] == "/models/target-canary"


def test_a_canary_of_a_secured_overlay_takes_nothing_of_it(tmp_path: Path) -> None:
    """Certificates and autoscalers stay the overlay's: deleting the canary must leave them."""
    before = render_whole(KUBERNETES / "overlays/gpu-tls-autoscaling")
    canary = render(compose(tmp_path, "gpu-tls-autoscaling", ("canary",)))
    assert {each["kind"] for each in canary} == {"ConfigMap", "Deployment", "PodDisruptionBudget"}
    assert not {title(each) for each in before} & {title(each) for each in canary}
    (volume,) = [each for each in pod(named(canary, "Deployment", "target-canary"))["volumes"] if each["name"] == "tls"]
    assert volume == next(
        each for each in pod(named(before, "Deployment", "target"))["volumes"] if each["name"] == "tls"
    )


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    return render_whole(compose(tmp_path_factory.mktemp("routed"), "demo", ("routes",)))


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "expected"),
    [
        ("HTTPRoute", "gateway", ("hostnames",), ["grpc.specdec.example"], "a name has one kind of route"),
        ("HTTPRoute", "gateway", ("rules", 0, "timeouts"), {}, "long streams are cut"),
        ("HTTPRoute", "gateway", ("rules", 0, "timeout"), "1s", "timeout is no field of it"),
        ("GRPCRoute", "coordinator", ("rules", 0, "backendRefs", 0, "port"), 8000, "has no grpc at port 8000"),
        ("GRPCRoute", "coordinator", ("rules", 0, "backendRefs", 0, "name"), "x", "there is no Service/x"),
        ("GRPCRoute", "coordinator", ("rules", 0, "timeouts"), {}, "timeouts is no field of it"),
    ],
)
def test_mistakes_in_routes_are_found(
    routed: list[Document], kind: str, name: str, path: tuple[str | int, ...], value: object, expected: str
) -> None:
    documents = copy.deepcopy(routed)
    place = named(documents, kind, name)["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert any(expected in problem for problem in problems(documents)), problems(documents)


def test_a_redis_elsewhere_is_not_asked_in_plain_text(tmp_path: Path) -> None:
    documents = render_whole(compose(tmp_path, "demo", ("redis/managed",)))
    source = containers(named(documents, "Deployment", "coordinator"))[0]["envFrom"][0]["configMapRef"]["name"]
    named(documents, "ConfigMap", source)["data"]["SPECDEC_STORE"] = "redis://specdec@redis.example:6379/0"
    assert any("in plain text" in problem for problem in problems(documents))
