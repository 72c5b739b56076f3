"""What the image, the unit and the page on deploying name exists: neither Docker nor systemd is needed to see that."""

import configparser
import re
from pathlib import Path

import pytest

from moesaic.config import config_fields
from moesaic.server.metrics import METRICS
from moesaic.server.settings import ServerConfig

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "deploy" / "moesaic.service").read_text()
PAGE = (ROOT / "docs" / "deploying.md").read_text()
FIELDS = [*config_fields(), *config_fields(ServerConfig)]


@pytest.mark.parametrize("text", [DOCKERFILE, UNIT, PAGE], ids=["image", "unit", "page"])
def test_every_variable_is_that_of_a_setting(text: str) -> None:
    known = {field.variable for field in FIELDS} | {"MOESAIC_MODEL"}  # the unit's own
    named = set(re.findall(r"MOESAIC_[A-Z_]*[A-Z]", text))
    assert named - known == set()
    assert named


def test_every_flag_is_that_of_a_setting() -> None:
    docker = {"--rm", "--build-arg", "--gpus", "--shm-size", "--system", "--home", "--now"}
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - docker
    assert named <= {field.flag for field in FIELDS}


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    copied = [path for line in re.findall(r"^COPY ([^-].*)$", DOCKERFILE, re.MULTILINE) for path in line.split()[:-1]]
    assert copied
    kept = set((ROOT / ".dockerignore").read_text().split())
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path}" in kept, path


def test_an_extra_of_the_image_is_one_of_the_package() -> None:
    extras = re.search(r"\[project.optional-dependencies\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert extras is not None
    for name in re.findall(r"EXTRAS=(\w+)", DOCKERFILE + PAGE):
        assert re.search(rf"^{name} = ", extras[1], re.MULTILINE), name


def test_the_unit_waits_longer_than_requests_may_drain() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # as the library says
    unit.read_string(UNIT)
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > ServerConfig().drain_timeout_s
    assert service["ExecStart"].split()[0].endswith("/moesaic")
    assert service["KillSignal"] == "SIGTERM"


def test_metrics_that_the_page_names_exist() -> None:
    known = {f"moesaic_{spec.name}" for spec in METRICS}
    for name in re.findall(r"moesaic_\w+", PAGE):
        assert name in known, name
