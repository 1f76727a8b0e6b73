"""The package as a user meets it: its names, its version, its entry points, and which way its imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mla_compile

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    "CaptureError",
    "ExportError",
    "InputError",
    "MlaCompileError",
    "MlaCompileWarning",
    "ModelFileError",
    "OptionError",
    "Options",
    "Report",
    "SiteReport",
    "WeightError",
    "__version__",
    "explain",
    "export_onnx",
    "migrate_cache",
    "optimize",
}


def test_public_names_are_pinned_and_importable():
    assert set(mla_compile.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(mla_compile, name) is not None
    assert set(dir(mla_compile)) >= PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        _ = mla_compile.optimise


def test_every_error_is_of_one_family():
    for name in ("CaptureError", "ExportError", "InputError", "ModelFileError", "OptionError", "WeightError"):
        assert issubclass(getattr(mla_compile, name), mla_compile.MlaCompileError)
    assert issubclass(mla_compile.MlaCompileWarning, UserWarning)


def test_import_costs_little_beyond_torch():
    """Importing registers the ops, so that a saved graph which uses them loads, and brings nothing heavy along."""
    code = (
        "import sys, torch, torch.utils.flop_counter\n"  # which imports triton itself where it is installed
        "before = set(sys.modules)\n"
        "import mla_compile\n"
        "modules = set(sys.modules) - before\n"
        "assert not [m for m in modules if m.startswith('mla_compile') and m.endswith(('_triton', '_gluon'))]\n"
        "new = {name.split('.')[0] for name in modules}\n"
        "print(sorted(new & {'transformers', 'typer', 'rich', 'triton', 'onnx', 'onnxruntime', 'sympy'}), "
        "torch.ops.mla_compile.decode_attention.default)"
    )
    out = _python(code)
    assert out == "[] mla_compile.decode_attention.default"


def test_commands_say_which_extra_is_missing():
    """The command line runs with torch, sympy, rich and typer alone."""
    code = (
        "import sys, warnings\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'transformers'):\n"
        "            raise ModuleNotFoundError(name, name=name.split('.')[0])\n"
        "sys.meta_path.insert(0, Missing())\n"
        "warnings.simplefilter('ignore')\n"
        "from typer.testing import CliRunner\n"
        "from mla_compile.cli.app import app\n"
        "ran = CliRunner().invoke(app, ['run', 'x', '--prompt-ids', '1'])\n"
        "print(ran.exit_code, 'mla-compile[onnx]' in ran.output, CliRunner().invoke(app, ['--help']).exit_code)"
    )
    assert _python(code) == "2 True 0"


def test_transformers_does_not_take_our_kernels_folder_for_its_own():
    """In a folder where `kernels/` can be imported by that name, transformers is not misled and ops register once."""
    code = "import mla_compile, transformers; print(transformers.DeepseekV3ForCausalLM.__name__)"
    assert _python(code) == "DeepseekV3ForCausalLM"


def _python(code: str) -> str:
    """What a new interpreter, started in the folder that holds tests/, prints."""
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("mla-compile")
    except metadata.PackageNotFoundError:
        pytest.skip("mla-compile is run from a checkout and not installed, so it has no entry points")


def test_version_is_the_installed_one():
    assert _distribution().version == mla_compile.__version__


def test_backend_is_listed_and_found_by_torch_without_importing_us():
    _distribution()
    code = (
        "import sys, torch\n"
        "print('mla' in torch.compiler.list_backends(), 'mla_compile' in sys.modules)\n"
        "torch.compile(lambda x: x + 1, backend='mla')"
    )
    assert _python(code) == "True False"


# Imports point one way: a module imports its own layer and the layers below it, never one above.
LAYERS = (
    ("dims", "drawing", "errors", "quantities", "version"),
    ("measuring",),
    ("kernels",),
    ("ops",),
    ("codes", "records", "program", "options"),
    ("passes",),
    ("grouping", "report", "weights", "facts", "explained", "page"),
    ("inline", "subclasses"),
    ("latent", "cache_change", "caching"),
    ("emit_cache",),
    ("capture", "emit"),
    ("pipeline",),
    ("dynamo_config", "causes"),
    ("recompiles",),
    ("runtime", "monitor"),
    ("latent_calls",),
    ("backend",),
    ("forward", "trace"),
    ("api",),
    ("onnx",),
    ("config_file", "machines"),
    ("__init__",),
    ("skeleton",),
    ("sources",),
    ("survey",),
    ("planning",),
    ("plotting",),
    ("decode_steps",),
    ("bench",),
    ("demo",),
    ("cli_values", "cli_common"),
    ("cli_bench", "cli_explain", "cli_export", "cli_plan", "cli_run"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, wherever its file lies."""
    package = Path(mla_compile.__file__).parent
    found = {f"mla_compile.{p.stem}": p for p in package.glob("*.py")}
    for folder in ("onnx", "page", "passes", "kernels"):
        home = package / folder if (package / folder).is_dir() else package.parent / folder
        found |= {
            ".".join(("mla_compile", folder, *p.relative_to(home).with_suffix("").parts)).removesuffix(".__init__"): p
            for p in home.rglob("*.py")
        }
    return found


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path.name}:{node.lineno}: relative import; the layers are read from absolute ones"
            )
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.split(".")[0] == "mla_compile"}
    return {_owner(name, modules) for name in ours}


def _owner(name: str, modules: dict[str, Path]) -> str:
    """The module a dotted name lies in; a name of the package itself belongs to ``mla_compile.__init__``."""
    while name not in modules and "." in name:
        name = name.rsplit(".", 1)[0]
    return name if name in modules else "mla_compile.__init__"


def _rank(module: str) -> int:
    name = module.split(".")[1]
    assert name in RANK, f"mla_compile/{name}.py has no place in LAYERS: say which layer it belongs to"
    return RANK[name]


def test_imports_point_one_way():
    modules = _modules()
    assert {"mla_compile.ops", "mla_compile.passes.decide.cost", "mla_compile.kernels.reference"} <= set(modules)
    up = [
        f"{module} imports {target}"
        for module, path in sorted(modules.items())
        for target in sorted(_imports(path, modules))
        if _rank(target) > _rank(module)
    ]
    assert not up, "\n".join(up)


def test_kernels_know_no_graph_and_passes_know_no_triton():
    forbidden = {"kernels": {"transformers", "torch.fx"}, "passes": {"transformers", "triton"}}
    for module, path in _modules().items():
        for name in forbidden.get(module.split(".")[1], ()):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(t == name or t.startswith(f"{name}.") for t in targets), f"{module} imports {name}"
