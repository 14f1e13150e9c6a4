"""The package list, the links, and what an import and a built wheel contain.

The first tests guard the arrangement of folders: three packages whose code lies outside
`moe_runtime/`. They run in a checkout; a source archive has no links.
"""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("kernels", "policies", "models")


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
            if not through_link:
                found.append(relative)
    return found


def package_of(relative: Path) -> str:
    parts = relative.parent.parts
    return ".".join(parts if parts[0] == "moe_runtime" else ("moe_runtime", *parts))


def test_package_list_equals_disk() -> None:
    on_disk = {package_of(path) for path in product_files()}
    listed = project_table()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    # The three folders themselves hold no Python file of their own.
    assert set(listed) - {f"moe_runtime.{name}" for name in MAPPED} == on_disk


@pytest.mark.parametrize("name", MAPPED)
def test_link_leads_to_folder(name: str) -> None:
    link = ROOT / "moe_runtime" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name
    # With one, a checkout on sys.path would offer an ordinary package of this bare name.
    assert not (ROOT / name / "__init__.py").exists()


def test_subfolders_are_packages() -> None:
    folders = {path.parent for path in product_files()} - {Path(name) for name in MAPPED}
    assert [
        str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()
    ] == []


def test_import_is_light() -> None:
    code = (
        "import moe_runtime, sys; "
        "heavy = {'torch', 'triton', 'transformers', 'kernels', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=ROOT / "tests")


def test_public_names_resolve() -> None:
    import moe_runtime

    for name in moe_runtime.__all__:
        assert getattr(moe_runtime, name).__name__ == name
    assert set(moe_runtime.__all__) <= set(dir(moe_runtime))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = moe_runtime.nothing_of_the_kind


@pytest.mark.slow
def test_wheel_holds_everything_and_needs_no_compiler(tmp_path: Path) -> None:
    """A wheel built from this tree has every module and data file, and imports on its own."""
    # A copy, so that the build leaves nothing in the checkout.
    source = tmp_path / "source"
    copy_tracked_tree(source)
    wheel, said = build_wheel(source, tmp_path, compiler=tmp_path / "no-such-compiler")
    assert "Install a C compiler" in said
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)

    for path in tracked_files("moe_runtime", *MAPPED):
        inside = path if path.parts[0] == "moe_runtime" else Path("moe_runtime") / path
        assert (unpacked / inside).is_file(), f"the wheel lacks {path}: see package-data"
        assert (unpacked / inside).read_bytes() == (source / path).read_bytes()
    assert not list(unpacked.rglob("*.so"))
    # Nothing under the bare names, which belong to other distributions.
    assert not any((unpacked / name).exists() for name in MAPPED)

    code = (
        f"import sys; sys.path.insert(0, {str(unpacked)!r}); import moe_runtime; "
        f"assert moe_runtime.__file__.startswith({str(unpacked)!r}), moe_runtime.__file__; "
        "assert moe_runtime.load"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=empty)


def build_wheel(source: Path, target: Path, compiler: Path) -> tuple[Path, str]:
    """Build in the environment that the tests run in: needs no network. Gives what was said too."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)],
        check=True,
        cwd=target,
        env={**os.environ, "CC": str(compiler)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (wheel,) = target.glob("moe_runtime-*.whl")
    return wheel, done.stdout


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
