"""How the native library is built, what it says of itself, and when a session should have it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from mla_compile.errors import ExportError, ModelFileError, OptionError
from mla_compile.kernels.devices import PRESETS
from mla_compile.onnx import build, cubins, native, variants
from mla_compile.onnx.variants import NodeWidths


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library as a user builds it, of one architecture, dtype and pair of widths: some 20 kernels."""
    folder = tmp_path_factory.mktemp("library")
    lines: list[str] = []
    path = build.build_library(
        folder,
        archs=("sm_90",),
        dims=(NodeWidths(64, 16),),
        dtypes=("float32",),
        cache=folder / "cubins",
        say=lines.append,
    )
    assert len(lines) > 10
    assert re.fullmatch(r"(\d+) kernels for sm_90, 0 of them compiled before: about \d minutes? on 1 core", lines[0])
    assert lines[1].startswith(f"[1/{lines[0].split()[0]}]")
    return path


def test_sources_compile_without_a_warning(tmp_path):
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow"]
    for source in sorted(build.SOURCES.glob("*.c")):
        subprocess.run(["cc", *flags, "-Werror", "-c", str(source), "-o", str(tmp_path / "x.o")], check=True)


def test_the_planner_in_c_knows_the_same_devices():
    """What a library for sm_80, sm_90 and sm_100 does not show: tests/onnx/test_native_cuda.py compares their plans."""
    (code,) = re.findall(r"double usual_bandwidth.*?;", (build.SOURCES / "plan.c").read_text(), re.DOTALL)
    said = {f"sm_{arch}": float(rate) for arch, rate in re.findall(r"arch >= (\d+) +\? ([\d.e]+)", code)}
    said["sm_80"] = float(re.findall(r": ([\d.e]+);", code)[0])  # of anything older than those
    assert said == {name: device.bandwidth for name, device in PRESETS.items()}


def test_the_manifest_says_what_the_library_holds(built):
    library = native.inspect(built)
    has = library.manifest
    assert has["archs"] == ["sm_90"]
    assert has["dtypes"] == ["float32"]
    assert has["dims"] == [{"La": 64, "Lb": 16, "Lv": 64, "values": False, "softcap": False, "window": False}]
    assert (has["api_version"], has["op_version"], has["masks"]) == (21, 1, ["none", "bool", "float"])
    assert has["kernels"] == len(variants.variants(("sm_90",), ("float32",), (NodeWidths(64, 16),)))
    assert has["kernels_sha256"] == cubins.kernels_sha256()
    assert not [name for name in has["spilled"] if "mask none" in name]
    assert library.device(-1) is None


def test_tuned_kernels_that_keep_too_much_in_memory_are_noticed(monkeypatch):
    plain = variants.variants(("sm_90",), ("float16",), variants.TUNED[:1])[0]
    made = cubins.Cubin("attend", 0, 128, cubins.SPILLED[plain.mask] + 1, b"")
    monkeypatch.setattr(cubins, "_compiled", lambda variant: made)
    with pytest.raises(ExportError, match="spills 129 bytes of registers per thread, expected at most 128"):
        cubins.cubin(plain, None)
    other = variants.variants(("sm_90",), ("float16",), (NodeWidths(384, 64),))[0]
    assert cubins.cubin(other, None)[0].spilled == 129  # said in the manifest


def test_the_library_holds_no_path_of_this_machine(built):
    content = built.read_bytes()
    for folder in (str(Path(__file__).parents[2]), sys.prefix, str(built.parent), os.path.expanduser("~/")):
        assert folder.encode() not in content


def test_a_kernel_is_compiled_again_after_a_change_of_what_it_imports(tmp_path, monkeypatch):
    kernels = Path(cubins.devices.__file__).parent
    shutil.copytree(kernels / "triton", tmp_path / "triton")
    monkeypatch.setattr(cubins.devices, "__file__", str(tmp_path / "devices.py"))
    digest = cubins.kernels_sha256.__wrapped__
    seen = {digest()}
    for name in ("decode_triton.py", "operands_triton.py", "scores_triton.py"):
        with (tmp_path / "triton" / name).open("a") as file:
            file.write("# changed\n")
        seen.add(digest())
    assert len(seen) == 4


def test_a_second_build_takes_its_kernels_from_the_cache(built, monkeypatch):
    monkeypatch.setattr(cubins, "_compiled", lambda variant: pytest.fail(f"{variant} was compiled again"))
    lines: list[str] = []
    build.build_library(
        built.parent / "again", archs=("sm_90",), dims=(NodeWidths(64, 16),), dtypes=("float32",),
        cache=built.parent / "cubins", say=lines.append,
    )  # fmt: skip
    count = len(lines) - 2
    assert lines[0] == f"{count} kernels for sm_90, {count} of them compiled before: no time"
    assert all(line.endswith("cached") for line in lines[1:-1])
    assert (built.parent / "again" / native.NAME).read_bytes() == built.read_bytes()


def test_a_node_in_half_precision_compiles_as_the_host_launches_it(tmp_path):
    """Query scratch, a row mask, and the largest tile: the kernel with the most parameters."""
    found = variants.variants(("sm_90",), ("bfloat16",), (NodeWidths(64, 16),))
    chosen = next(v for v in found if v.query == "float32" and v.mask == "bool" and v.causal)
    made, known = cubins.cubin(chosen, None)
    assert "staged" in chosen.arguments()
    assert (made.name, made.threads, known) == ("attend", 256, False)
    assert made.image[:4] == b"\x7fELF"


PTX = """.visible .entry attend(
\t.param .u64 .ptr .global .align 16 attend_param_0,
\t.param .u32 attend_param_1,
\t.param .u64 .ptr .global .align 1 attend_param_2,
\t.param .u64 .ptr .global .align 1 attend_param_3
)
.reqntid 128
"""
METADATA = {"name": "attend", "shared": 1000, "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1}


@pytest.mark.parametrize(
    ("ptx", "passed", "metadata", "text"),
    [
        (PTX, ["*bf16"], {}, "its parameters have"),
        (PTX, ["*bf16", "i64"], {}, "its parameters have"),
        (PTX.replace(",\n\t.param .u64 .ptr .global .align 1 attend_param_3", ""), ["*bf16", "i32"], {}, "parameters"),
        (PTX.replace("attend_param_3\n", "attend_param_3,\n\t.param .u64 more\n"), ["*bf16", "i32"], {}, "parameters"),
        (PTX, ["*bf16", "i32"], {"global_scratch_size": 16}, "global_scratch_size is 16, expected 0"),
        (PTX, ["*bf16", "i32"], {"profile_scratch_size": 8}, "profile_scratch_size is 8, expected 0"),
        (PTX, ["*bf16", "i32"], {"num_ctas": 2}, "num_ctas is 2"),
        (PTX, ["*bf16", "i32"], {"launch_pdl": True}, "launch_pdl"),
        (PTX, ["*bf16", "i32"], {"shared": 300_000}, "300000 bytes of shared memory"),
        (PTX.replace("128", "256"), ["*bf16", "i32"], {}, "for 256 threads, expected 128"),
        (PTX.replace("attend(", "combine("), ["*bf16", "i32"], {}, "its entry is combine"),
        ("", ["*bf16", "i32"], {}, "its entry is missing"),
    ],
)
def test_a_kernel_that_the_host_would_launch_wrongly_is_noticed(ptx, passed, metadata, text):
    right = cubins.wrong_launch(PTX, ["*bf16", "i32"], SimpleNamespace(**METADATA), 4, 232_448)
    assert right is None
    wrong = cubins.wrong_launch(ptx, passed, SimpleNamespace(**{**METADATA, **metadata}), 4, 232_448)
    assert wrong is not None
    assert text in wrong


def test_a_library_is_not_built_of_kernels_that_would_be_launched_wrongly(tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "_HIDDEN", 3)
    with pytest.raises(ExportError, match="that the library would launch wrongly"):
        build.build_library(
            tmp_path, archs=("sm_90",), dims=(NodeWidths(64, 16),), dtypes=("float32",), cache=tmp_path / "c"
        )
    assert not (tmp_path / native.NAME).exists()


def test_what_is_missing_for_a_build_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O3")
    with pytest.raises(ExportError, match=r"no C compiler 'no-such-compiler'.*variable CC"):
        build.build_library(tmp_path)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"pip install 'mla-compile\[triton\]'"):
        build.build_library(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_nothing(built, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ExportError, match="false failed"):
        build.build_library(
            tmp_path, archs=("sm_90",), dims=(NodeWidths(64, 16),), dtypes=("float32",), cache=built.parent / "cubins"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"archs": ("sm_91",)}, r"'sm_91' is unknown \(did you mean"),
        ({"dtypes": ("float64",)}, "'float64' is unknown"),
        ({"dims": ()}, "at least one"),
        ({"archs": ("sm_86",), "dims": (NodeWidths(16384, 64),)}, "use narrower rows"),
    ],
)
def test_a_build_that_cannot_be_is_refused(given, text, tmp_path):
    with pytest.raises(OptionError, match=text):
        build.build_library(tmp_path, **given)


def test_the_command_line_says_in_one_line_what_is_wrong(tmp_path, capsys):
    assert build.main(["--dims", "512", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "--dims '512': expected La,Lb or La,Lb,Lv, as in 512,64\n"
    assert build.main(["--model", str(tmp_path)]) == 1
    assert "is not the manifest of an export" in capsys.readouterr().err


NODE = {"H": 4, "La": 64, "Lb": 16, "Lv": 64, "mask": "bool", "sinks": False, "softcap": 0.0, "window": 0}


def test_dims_come_from_a_model(tmp_path):
    path = tmp_path / "mla_compile.json"
    other = {**NODE, "La": 32, "Lv": 24, "softcap": 30.0}
    path.write_text(json.dumps({"profile": "portable", "dtype": "bfloat16", "attention": [NODE, NODE, other]}))
    assert build.dims_of_model(tmp_path) == ((NodeWidths(64, 16), NodeWidths(32, 16, 24, softcap=True)), "bfloat16")
    path.write_text(json.dumps({"profile": "genai", "dtype": "bfloat16", "attention": [NODE]}))
    with pytest.raises(ModelFileError, match="two halves"):
        build.dims_of_model(tmp_path)


CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize(
    ("node", "dtype", "providers", "version", "text"),
    [
        ({}, "float32", CUDA[1:], "1.31.1", "no CUDAExecutionProvider"),
        ({}, "float32", CUDA, "1.20.1", "needs onnxruntime 1.21, this is 1.20.1"),
        ({}, "bfloat16", CUDA, "1.31.1", "kernels for float32, the model is bfloat16"),
        ({"La": 512}, "float32", CUDA, "1.31.1", r"no kernel for La\+Lb = 512\+16"),
        ({"softcap": 1.0}, "float32", CUDA, "1.31.1", "Lv = 64, softcap"),
        ({"values": True}, "float32", CUDA, "1.31.1", "no kernel"),
        ({"value_width": 80}, "float32", CUDA, "1.31.1", "sums 80 columns"),
    ],
)
def test_the_reason_why_a_library_is_left_out(node, dtype, providers: Sequence[str], version, text, built):
    library = native.inspect(built)
    for entry in ({**NODE, **node}, SimpleNamespace(**{**NODE, **node})):  # a manifest's dict, or a record
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(native.usable(library, [NODE, entry], dtype, providers, version))


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [
        ("sm_90", ("sm_80", "sm_90"), True),
        ("sm_103", ("sm_100",), False),
        ("sm_100", ("sm_90",), False),
        ("sm_89", ("sm_86",), True),
        ("sm_89", ("sm_80",), False),  # its tiles need more shared memory than there is
        ("sm_89", ("sm_80", "sm_86"), True),
        ("sm_87", ("sm_80",), True),
        ("sm_80", ("sm_86",), False),
        ("sm_75", ("sm_80",), False),
    ],
)
def test_where_kernels_run(arch, built, runs):
    assert native._runs_on(arch, built) is runs


def test_a_file_that_is_no_library_of_ours_is_told(built, tmp_path):
    garbage = tmp_path / "garbage.so"
    with pytest.raises(ModelFileError, match="cannot be read"):
        native.inspect(garbage)
    garbage.write_bytes(b"no library at all, but long enough")
    with pytest.raises(ModelFileError, match="is not a shared library; build it again"):
        native.inspect(garbage)
    garbage.write_bytes(built.read_bytes()[:3000])
    with pytest.raises(ModelFileError, match="is cut off at 3000 bytes"):
        native.inspect(garbage)
    other = bytearray(built.read_bytes()[:64])
    other[18:20] = b"\x08\x00"  # MIPS
    garbage.write_bytes(other)
    with pytest.raises(ModelFileError, match="for another processor"):
        native.inspect(garbage)
    with pytest.raises(ModelFileError, match="not one of mla_compile's"):
        native.inspect(_libm())


def _libm() -> str:
    """Some shared library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    return next(line.split()[-1] for line in maps.splitlines() if "libm.so" in line or "libm-" in line)


def test_a_library_of_another_format_is_told(tmp_path):
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    text = '{\\"format\\": 2, \\"domain\\": \\"mla_compile\\", \\"op\\": \\"DecodeAttention\\"}'
    for manifest, said in ((text, "of format 2, expected 1"), ("nonsense", "cannot be read")):
        source.write_text(
            f'const char *mla_compile_onnx_manifest(void) {{ return "{manifest}"; }}\n'
            "int mla_compile_onnx_device(int i) { return i; }\nvoid *RegisterCustomOps(void) { return 0; }\n"
        )
        library = tmp_path / f"{len(said)}.so"
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        with pytest.raises(ModelFileError, match=said):
            native.inspect(library)


def test_a_library_is_found_where_it_is_named_or_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert native.find() is None
    place = tmp_path / "mla_compile" / "onnx" / native.NAME
    place.parent.mkdir(parents=True)
    place.touch()
    assert native.find() == place
    monkeypatch.setenv(native.VARIABLE, str(tmp_path / "missing.so"))
    with pytest.raises(ModelFileError, match="MLA_COMPILE_ONNX_LIBRARY names"):
        native.find()
    (tmp_path / "missing.so").touch()
    assert native.find() == tmp_path / "missing.so"


def test_reading_a_library_and_importing_sessions_bring_neither_onnx_nor_onnxruntime(built):
    code = (
        "import sys, mla_compile.onnx.session, mla_compile.onnx.generation, mla_compile.cli.run\n"
        "from mla_compile.onnx import native\n"
        f"print(native.inspect({str(built)!r}).manifest['op'])\n"
        "print(sorted({'onnx', 'onnxruntime', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DecodeAttention", "[]"]
