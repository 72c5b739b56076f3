import subprocess
import sys
from pathlib import Path

import pytest

import moesaic


def test_importing_the_package_loads_no_tensor_library() -> None:
    code = "import moesaic, sys; sys.exit(bool({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    source = str(Path(moesaic.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False).returncode == 0


@pytest.mark.parametrize("name", moesaic.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(moesaic, name) is not None
    assert name in dir(moesaic)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Model'"):
        moesaic.Model  # noqa: B018
