"""The package list, the links, and what an import and a built wheel contain."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("benchmarks", "kernels", "policies", "models")
SUITE = ("cases", "commands", "peers", "suite", "synthetic")
"""What of ``benchmarks`` a wheel has; scripts and what they measured belong to the checkout."""


def project_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def product_files() -> list[Path]:
    """Every Python file of the package, relative to the root, each by its real place only."""
    found = []
    for top in ("moe_runtime", *MAPPED):
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            # Some Python versions follow links while walking.
            through_link = relative.parts[0] == "moe_runtime" and relative.parts[1] in MAPPED
            if not through_link and not is_of_the_checkout(relative):
                found.append(relative)
    return found


def is_of_the_checkout(path: Path) -> bool:
    return path.parts[0] == "benchmarks" and path.parts[1] not in SUITE


def package_of(relative: Path) -> str:
    parts = relative.parent.parts
    return ".".join(parts if parts[0] == "moe_runtime" else ("moe_runtime", *parts))


def test_package_list_equals_disk():
    on_disk = {package_of(path) for path in product_files()}
    listed = project_table()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    # The four folders themselves hold no Python file of the package.
    assert set(listed) - {f"moe_runtime.{name}" for name in MAPPED} == on_disk


@pytest.mark.parametrize("name", MAPPED)
def test_link_leads_to_folder(name):
    link = ROOT / "moe_runtime" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    # With one, a checkout on sys.path would offer an ordinary package of this bare name.
    assert not (ROOT / name / "__init__.py").exists()


def test_subfolders_are_packages():
    folders = {path.parent for path in product_files()} - {Path(name) for name in MAPPED}
    assert [
        str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()
    ] == []


def test_import_is_light():
    code = (
        "import moe_runtime, sys; "
        "heavy = {'torch', 'triton', 'transformers', 'kernels', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT / "tests")


def test_public_names_resolve():
    import moe_runtime

    for name in moe_runtime.__all__:
        assert getattr(moe_runtime, name).__name__ == name
    assert set(moe_runtime.__all__) <= set(dir(moe_runtime))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = moe_runtime.nothing_of_the_kind


@pytest.mark.long  # the package list is compared with the folders above
def test_wheel_holds_everything_and_needs_no_compiler(tmp_path):
    """A wheel built from this tree has every module and data file, and imports on its own."""
    # A copy, so that the build leaves nothing in the checkout.
    source = tmp_path / "source"
    copy_tracked_tree(source)
    # without pip, which asks for the metadata first
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    said = subprocess.run(
        [sys.executable, "-c", build, tmp_path],
        check=True, cwd=source, env={**os.environ, "CC": str(tmp_path / "no-such-compiler")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ).stdout  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert "Install a C compiler" in said
    assert wheel.name.endswith("-py3-none-any.whl")
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)

    for path in tracked_files("moe_runtime", *MAPPED):
        inside = path if path.parts[0] == "moe_runtime" else Path("moe_runtime") / path
        # nine tenths of what a wheel would be; what was measured on other machines
        if path.suffix == ".safetensors" or is_of_the_checkout(path):
            assert not (unpacked / inside).exists()
            continue
        assert (unpacked / inside).is_file(), f"the wheel lacks {path}: see package-data"
        assert (unpacked / inside).read_bytes() == (source / path).read_bytes()
    assert not list(unpacked.rglob("*.so"))
    # Nothing under the bare names, which belong to other distributions.
    assert not any((unpacked / name).exists() for name in MAPPED)

    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); import moe_runtime; "
        f"assert moe_runtime.__file__.startswith({str(unpacked)!r}), moe_runtime.__file__; "
        "assert moe_runtime.load; from moe_runtime.models.pocket import pocket_path; pocket_path()"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, cwd=empty, capture_output=True, text=True
    )
    assert "an installed package comes without its weights" in done.stderr


def setup_script() -> ModuleType:
    """`setup.py` as a module: it builds nothing when it is imported."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        # The newest function decides, and numbers are not text: 2.9 is older than 2.34.
        (["libc.so.6", "GLIBC_2.9", "GLIBC_2.34", "GLIBC_2.2.5"], "manylinux_2_34_x86_64"),
        (["libc.so.6", "libm.so.6", "GLIBC_2.2.5"], "manylinux_2_17_x86_64"),
        # What no other machine need have.
        (["libc.so.6", "libgomp.so.1", "GLIBC_2.34"], "linux_x86_64"),
        (["libc.musl-x86_64.so.1"], "linux_x86_64"),
    ],
)
def test_platform_is_the_oldest_that_has_what_libraries_call(names, tag):
    content = b"\x7fELF\0" + b"\0".join(name.encode() for name in names) + b"\0"
    assert setup_script().platform_of([b"\0GLIBC_2.3\0", content], "linux_x86_64") == tag
    assert setup_script().platform_of([content], "macosx_14_0_arm64") == "macosx_14_0_arm64"


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")
def test_platform_of_the_built_library_agrees_with_binutils():
    from moe_runtime.kernels.native import describe

    path = describe().path
    if not path.is_file():
        pytest.skip("the native library was not built")
    said = subprocess.run(
        ["readelf", "-V", path], check=True, capture_output=True, text=True
    ).stdout
    asked = [word.removeprefix("GLIBC_") for word in said.split() if word.startswith("GLIBC_")]
    newest = max((2, 17), *(tuple(map(int, one.split(".")[:2])) for one in asked))
    found = setup_script().platform_of([path.read_bytes()], "linux_x86_64")
    assert found == f"manylinux_{newest[0]}_{newest[1]}_x86_64"


def test_a_build_says_its_commit(tmp_path, monkeypatch):
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    script = setup_script()
    monkeypatch.chdir(ROOT)
    assert head.startswith(json.loads(script.build_facts())["commit"])
    # Neither a checkout nor a source archive; then one of these.
    monkeypatch.chdir(tmp_path)
    assert script.build_facts() is None
    script.BUILD_FACTS.parent.mkdir()
    script.BUILD_FACTS.write_text('{"commit": "of the archive"}')
    assert script.build_facts() == '{"commit": "of the archive"}'


@pytest.mark.long
def test_wheel_works_where_there_is_no_compiler(tmp_path):
    """A wheel with its native library, built from the source archive, in an environment of its own:
    version, bench and report."""
    source, site = tmp_path / "source", tmp_path / "venv"
    copy_tracked_tree(source)
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    subprocess.run([sys.executable, "-P", "-c", archive], check=True, cwd=source)
    (sources,) = tmp_path.glob("moe_runtime-*.tar.gz")
    wheel = build_wheel(sources, tmp_path)
    _, _, python_tag, abi_tag, platform_tag = wheel.stem.split("-")
    assert (python_tag, abi_tag) == ("py3", "none")
    assert platform_tag.startswith("manylinux_2_")
    with zipfile.ZipFile(wheel) as files:
        libraries = [files.read(name) for name in files.namelist() if name.endswith(".so")]
    assert len(libraries) == 2
    # Nothing of the machine that built it.
    assert not any(str(Path.home()).encode() in library for library in libraries)

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", site], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(site)})
    pip = [sys.executable, "-m", "pip", "--python", site / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    Path(packages, "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "env").symlink_to(shutil.which("env") or "env")

    def run(*words: str | Path) -> str:
        environment = {"PATH": f"{site / 'bin'}:{tools}", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        command = [site / "bin" / "moe-runtime", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    facts = json.loads(run("--version", "--json"))
    assert facts["native"]["problem"] is None
    assert {"avx2", "avx512", "portable"} <= set(facts["native"]["built"])
    model = ROOT / "models" / "pocket"
    # Of eight tokens in bf16, one lies between two logits that are a rounding apart.
    few = ("--time", "1", "-n", "2", "--prompt-tokens", "4", "--agreement", "0.75")
    run("bench", "latency", model, "--peer", "transformers", *few, "-o", "r.json")
    results = json.loads((tmp_path / "r.json").read_text())
    assert [one["failure"] for one in results["measurements"]] == [None, None]
    run("bench", "compare", "r.json", "r.json")
    run("bench", "report", "r.json", "-o", "page.html")
    assert "latency" in (tmp_path / "page.html").read_text()


def build_wheel(source: Path, target: Path) -> Path:
    """Build in the environment that the tests run in: needs no network."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True, cwd=target)
    (wheel,) = target.glob("moe_runtime-*.whl")
    return wheel


def copy_tracked_tree(target: Path) -> None:
    for path in tracked_files(".", links=True):
        source, copy = ROOT / path, target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        else:
            copy.write_bytes(source.read_bytes())


def tracked_files(*tops: str, links: bool = False) -> list[Path]:
    """The working tree as git sees it: tracked files, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *tops]
    listing = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    existing = [path for path in paths if (ROOT / path).exists()]
    return [path for path in existing if links or not (ROOT / path).is_symlink()]
