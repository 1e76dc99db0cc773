"""The matrix is read strictly, and a lock that is not its variant's is refused with package and remedy."""

import dataclasses
import hashlib
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from images import __main__ as command
from images import lock, lock_check, matrix
from tests.unit.loading import ROOT

VARIANTS = matrix.read()
LOCK = (ROOT / "images/locks/cu130-serve.txt").read_text()
HASH = f" \\\n    --hash=sha256:{'0' * 64}\n"


def changed(path: str, value: Any) -> str:
    """Return the matrix with a field set, or taken away where the value is None."""
    loaded: dict[str, Any] = yaml.safe_load(matrix.FILE.read_text())
    place = loaded["variants"]["cu129"]
    *parents, last = path.split(".")
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return yaml.safe_dump(loaded)


def found(text: str, variant: str = "cu130") -> str:
    chosen = VARIANTS[variant]
    return "\n".join(lock_check.problems(chosen, chosen.stack("serve"), text))


def lock_of(variant: str, **changes: str) -> str:
    """Return a lock with the packages of a variant's matrix row only; changes have _ for - in names."""
    packages = dict(VARIANTS[variant].stack("serve").packages) | {k.replace("_", "-"): v for k, v in changes.items()}
    return "".join(f"{name}=={version}{HASH}" for name, version in packages.items())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("cuda", None, "variants.cu129 has no cuda"),
        ("cuda", 12.9, "variants.cu129.cuda is 12.9, not of the type str. Put it in quotes"),
        ("cuda", "12", "Write major and minor"),
        ("packages", None, "variants.cu129 has no packages"),
        ("packages.torch", None, "variants.cu129.packages has no torch"),
        ("packages.torch", 2.11, "variants.cu129.packages.torch is 2.11, not of the type str"),
        ("packages.nvidia-nccl-cu12", None, "packages has no nvidia-nccl-cu12"),
        ("packages", ["torch"], "variants.cu129.packages is ['torch'], not of the type dict"),
        ("architectures", [], "variants.cu129.architectures is []"),
        ("architectures", [9.0], "variants.cu129.architectures is [9.0]"),
        ("driver_floor", {}, "variants.cu129.driver_floor is empty"),
        ("indexes", {"vllm": "https://example.org/whl"}, "variants.cu129.indexes names vllm"),
        ("colour", "red", "variants.cu129 has the unknown field colour"),
        ("stacks.serve.locked", "no", "variants.cu129.stacks.serve.locked is 'no', not of the type bool"),
        ("stacks.serve.requires", ["vllm"], "variants.cu129.stacks.serve.requires names vllm, which has no version"),
        ("stacks.serve", None, "variants.cu129.stacks is empty"),
    ],
)
def test_a_wrong_matrix_is_refused(path: str, value: Any, said: str) -> None:
    with pytest.raises(matrix.MatrixError, match=re.escape(said)):
        matrix.parse(changed(path, value))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "matrix is None"), ("[]", "matrix is []"), ("{a: [", "is not YAML"), ("variants: {cu1: 3}", "cu1 is 3")],
)
def test_what_is_no_matrix_is_refused(text: str, said: str) -> None:
    with pytest.raises(matrix.MatrixError, match=re.escape(said)):
        matrix.parse(text)


def test_unknown_variant_and_stack_name_the_known_ones() -> None:
    with pytest.raises(matrix.MatrixError, match=r"no variant 'cu131'\. Use one of cu128, cu129, cu130"):
        matrix.find(VARIANTS, "cu131")
    with pytest.raises(matrix.MatrixError, match=r"cu128 has no stack 'train'\. It has serve"):
        VARIANTS["cu128"].stack("train")


@pytest.mark.parametrize("algorithm", ["DFLASH", "ddtree"])
def test_cuda_12_8_refuses_dflash_with_the_reason(algorithm: str) -> None:
    with pytest.raises(matrix.MatrixError, match=f"cu128 refuses {algorithm.upper()}: no release .* Use NEXTN here"):
        VARIANTS["cu128"].require_algorithm(algorithm)
    VARIANTS["cu128"].require_algorithm("NEXTN")
    VARIANTS["cu130"].require_algorithm(algorithm)


def test_the_locks_agree_with_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["check"])
    assert "cu130-serve.txt" in capsys.readouterr().out


def test_the_list_has_every_stack(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(variant.stacks) for variant in VARIANTS.values())
    assert [line for line in lines if line.startswith("cu130 ") and " serve " in line and line.endswith("  locked")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lock_of_the_row_itself_agrees(variant: str) -> None:
    assert found(lock_of(variant), variant) == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\ntorch==2.11.0 ", "\ntorch==2.13.0 ", "torch==2.13.0, but the matrix has 2.11.0"),
        ("\ntorch==2.11.0 ", "\ntorch==2.11.0+cu129 ", "torch==2.11.0+cu129 is built for cu129"),
        ("\ntorch==2.11.0 ", "\ntorch>=2.11.0 ", "'torch>=2.11.0' is no requirement of one exact version"),
        ("\nsglang-kernel==", "\nsglang-kernel-cu12==", "sglang-kernel is missing; the matrix has 0.4.5"),
        ("\nnvidia-cudnn-cu13==", "\nnvidia-cudnn-cu12==", "nvidia-cudnn-cu12 is of another CUDA than 13.0"),
        (
            "\nnvidia-cuda-runtime==13.0.96 ",
            "\nnvidia-cuda-runtime==13.2.1 ",
            "nvidia-cuda-runtime==13.2.1 is not CUDA",
        ),
        ("\neasydict==", "\ntriton==3.6.0" + HASH + "easydict==", "triton is there twice"),
        (
            "\neasydict==",
            "\n--index-url https://example.org/whl\neasydict==",
            "A lock has neither options nor addresses",
        ),
        ("\neasydict==", "\nx @ https://example.org/x.whl" + HASH + "easydict==", "neither options nor addresses"),
    ],
)
def test_a_wrong_package_in_the_lock_is_named(old: str, new: str, said: str) -> None:
    assert old in LOCK
    assert said in found(LOCK.replace(old, new))


@pytest.mark.parametrize("hashes", ["", " --hash=md5:00", " --hash=sha256:00"])
def test_a_requirement_without_a_hash_is_named(hashes: str) -> None:
    assert (
        found(f"{LOCK}\nextra==1.0{hashes}\n") == "extra==1.0 has no sha256 hash. Make the lock with --generate-hashes."
    )


def test_torch_of_the_default_index_is_refused_where_the_variant_has_its_own() -> None:
    text = found(lock_of("cu129", torch="2.11.0"), "cu129")
    assert text.startswith("torch==2.11.0 is from the wrong index: 2.11.0+cu129 is wanted, from https://")


def test_a_lock_of_another_variant_names_every_difference() -> None:
    text = found(LOCK, "cu129")
    for package in ("torch", "sglang-kernel", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "cuda-toolkit"):
        assert re.search(rf"^{package}\b", text, re.M), package
    assert "nvidia-cutlass-dsl-libs-cu12" not in text


def wheel(index: Path, name: str, version: str, requires: str = "") -> None:
    """Put a package without content into an index in the form of folders."""
    folder, module = index / name, name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    links = [f'<a href="{one.name.replace("+", "%2B")}">{one.name}</a>' for one in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("\n".join(links))


def cu129_at(own: Path) -> tuple[matrix.Variant, matrix.Stack]:
    """Return the row cu129 with its indexes in a folder."""
    variant = VARIANTS["cu129"]
    there = dataclasses.replace(variant, indexes=dict.fromkeys(variant.indexes, own.as_uri()))
    return there, there.stack("serve")


@pytest.fixture
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the default index and one for CUDA 12.9, with what SGLang asks for there."""
    default, own = tmp_path / "default", tmp_path / "own"
    packages = VARIANTS["cu129"].stack("serve").packages
    extras = "".join(f"Provides-Extra: {one}\n" for one in ("cu12", "cu13"))
    for name, version in packages.items():
        plain = version.split("+")[0]
        needs = {
            "sglang": "".join(
                f"Requires-Dist: {one}\n" for one in (*packages, "nvidia-cutlass-dsl[cu13]") if one != "sglang"
            )
        }
        wheel(own if name in VARIANTS["cu129"].indexes else default, name, version, needs.get(name, ""))
        if version != plain:
            wheel(default, name, plain)
    wheel(
        default,
        "nvidia-cutlass-dsl",
        "4.6.0",
        f"{extras}Requires-Dist: nvidia-cutlass-dsl-libs-cu13; extra == 'cu13'\n",
    )
    wheel(default, "nvidia-cutlass-dsl-libs-cu13", "4.6.0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", default.as_uri())
    monkeypatch.setenv("UV_INDEX", "")
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    return default, own


def test_packages_with_an_index_of_their_own_are_locked_from_there_only(
    indexes: tuple[Path, Path], tmp_path: Path
) -> None:
    variant, stack = cu129_at(indexes[1])
    made = tmp_path / "cu129-serve.txt"
    lock.write(variant, stack, made, upgrade=False)
    assert lock_check.problems(variant, stack, made.read_text()) == []
    for name in variant.indexes:
        (file,) = (indexes[1] / name).glob("*.whl")
        assert hashlib.sha256(file.read_bytes()).hexdigest() in made.read_text()
    assert "nvidia-cutlass-dsl==" in made.read_text()
    assert "nvidia-cutlass-dsl-libs-cu13" not in made.read_text(), "it is excluded"


def test_the_default_index_never_stands_in_for_a_package_own(indexes: tuple[Path, Path], tmp_path: Path) -> None:
    variant, stack = cu129_at(indexes[1])
    shutil.rmtree(indexes[1] / "torch")
    wheel(indexes[0], "torch", "2.11.0+cu129")
    made = tmp_path / "cu129-serve.txt"
    made.write_text("former\n")
    with pytest.raises(
        lock.LockError, match=r"(?s)cu129-serve\.txt was not made \(torch from file://.*torch.*images/matrix"
    ):
        lock.write(variant, stack, made, upgrade=False)
    assert made.read_text() == "former\n"


def test_a_compiler_of_another_cuda_is_refused() -> None:
    for package in lock_check.COMPILERS["13"]:
        text = re.sub(rf"\n{package}==\S+", f"\n{package}==13.5.37", LOCK)
        assert f"{package}==13.5.37 compiles for a newer or older CUDA than 13.0" in found(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cu131-serve.txt", "no variant 'cu131'"),
        ("cu128-train.txt", "no stack 'train'"),
        ("nonsense.txt", "no variant ''"),
        ("cu128-serve.txt", "cu128-serve.txt: is not there"),
    ],
)
def test_a_lock_that_the_matrix_does_not_know_is_refused(name: str, said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        command.main(["check", name])
