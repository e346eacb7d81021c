"""The wheel and the sdist, each built and then installed into an environment of its own.

An environment has links to torch, and to what torch requires, in the environment of the tests: they
are large. uv installs all else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from casnap import __version__

pytestmark = pytest.mark.packages

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.prefix) / "packages/bin"
LOOP = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
_TABLE = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
EXTRAS = re.findall(r"^([a-z0-9-]+) = \[", _TABLE.partition("\n[")[0], re.MULTILINE)
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
ENVIRONMENT["UV_LINK_MODE"] = "copy"  # its cache is on a disk, and the environments in memory


def run(*command: object, cwd: Path = ROOT, status: int = 0) -> str:
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


def link_torch(folder: Path) -> None:
    """Fill a folder with links to torch, and to what it requires, in the environment of the tests.

    No installer may write through a link: the folder is no environment's own.
    """
    folder.mkdir()
    waiting, seen = ["torch"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(str(found.locate_file(top)))
        requirements = [Requirement(text) for text in found.requires or []]
        no_extra = {"extra": ""}
        waiting += [r.name for r in requirements if not r.marker or r.marker.evaluate(no_extra)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    run(TOOLS / "uv", "build", "--quiet", "--out-dir", folder)
    return {
        "sdist": folder / f"casnap-{__version__}.tar.gz",
        "wheel": folder / f"casnap-{__version__}-py3-none-any.whl",
    }


def test_an_index_would_take_them(built: dict[str, Path]) -> None:
    assert run(TOOLS / "twine", "check", "--strict", *built.values()).count("PASSED") == 2


def test_the_wheel_has_the_package_alone(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"casnap", f"casnap-{__version__}.dist-info"}
    assert "casnap/py.typed" in names
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("casnap/**/*.py")} <= names


def test_the_sdist_has_what_its_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = run("git", "ls-files", "casnap", "docs", "tests", "tools").split("\n")[:-1]
    assert set(tracked) - names == set()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_loop_of_the_readme_runs(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    env, work = tmp_path / "env", tmp_path / "work"
    python, casnap = env / "bin/python", env / "bin/casnap"
    run(TOOLS / "uv", "venv", "--quiet", "--python", sys.executable, env)
    link_torch(tmp_path / "links")
    next(env.glob("lib/python*/site-packages")).joinpath("links.pth").write_text(
        f"{tmp_path}/links"
    )
    (tmp_path / "linked.txt").write_text("torch; python_version < '3'")  # that is: never
    install = (TOOLS / "uv", "pip", "install", "--quiet", "--python", python)
    run(*install, "--overrides", tmp_path / "linked.txt", built[kind])
    work.mkdir()
    (work / "train.py").write_text(LOOP)
    for _ in range(2):
        run(python, "train.py", cwd=work)
    listed = run(casnap, "ls", "ckpts/run1", cwd=work).split("\n")[1:4]
    assert [line.split()[0] for line in listed] == ["step_100", "step_200", "step_300"]
    assert run(casnap, "--version", cwd=work) == f"casnap {__version__}\n"
    place = run(python, "-c", "import casnap; print(casnap.__file__)", cwd=work)
    assert Path(place).is_relative_to(env)


def test_importing_it_imports_no_torch() -> None:
    """Of no build: so CUDA is not begun either."""
    code = "import sys, casnap.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(sys.executable, "-c", code) == "False False\n"


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_can_be_installed(built: dict[str, Path], extra: str, tmp_path: Path) -> None:
    wanted = tmp_path / "requirements.in"
    wanted.write_text(f"casnap[{extra}] @ {built['wheel'].as_uri()}\n")
    assert "\ntorch==" in run(
        TOOLS / "uv", "pip", "compile", "--quiet", "--python", sys.executable, wanted
    )
