"""The package as a user meets it: its names, its version, its entry points, and which way its imports point."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module, metadata
from pathlib import Path

import pytest

import mla_compile
from tests.support.tiers import full

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
    "backend",
    "continuous_batching",
    "explain",
    "export_onnx",
    "load",
    "metrics",
    "migrate_cache",
    "optimize",
    "register_quantized_linear",
    "save",
}


def test_an_editable_install_is_a_path():
    """Type checkers and editors follow a path; they do not run the import hook that setuptools writes otherwise."""
    try:
        files = metadata.distribution("mla-compile").files or []
    except metadata.PackageNotFoundError:
        pytest.skip("the checkout is not installed")
    assert not [str(file) for file in files if file.name.startswith("__editable__") and file.suffix == ".py"]


def test_public_names_are_pinned_and_importable():
    assert set(mla_compile.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(mla_compile, name) is not None
    assert set(dir(mla_compile)) == PUBLIC


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("backend", ("mla", "reports")),
        ("codes", ("CODES", "Code", "section")),
        ("errors", ("MlaCompileError",)),
        ("kernels.decode", ("decode_attention", "merge", "paged_decode_attention")),
        ("onnx", ("Session", "export_onnx", "generate")),
        ("ops", ("decode_attention", "paged_decode_attention")),
        ("options", ("Options",)),
        ("report", ("Report", "SiteReport")),
    ],
)
def test_import_paths_that_stay(module, names):
    owner = import_module(f"mla_compile.{module}")
    assert all(getattr(owner, name) is not None for name in names)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        _ = mla_compile.optimise


def test_every_error_is_of_one_family():
    for name in ("CaptureError", "ExportError", "InputError", "ModelFileError", "OptionError", "WeightError"):
        assert issubclass(getattr(mla_compile, name), mla_compile.MlaCompileError)
    assert issubclass(mla_compile.MlaCompileWarning, UserWarning)


def test_import_costs_little_beyond_torch_and_leaves_transformers_alone():
    """Importing registers the ops, so that a saved graph which uses them loads, and brings nothing heavy along.

    In a folder where `kernels/` can be imported by that name, transformers is not misled and ops register once.
    """
    code = (
        "import sys, torch, torch.utils.flop_counter\n"  # which imports triton itself where it is installed
        "before = set(sys.modules)\n"
        "import mla_compile\n"
        "modules = set(sys.modules) - before\n"
        "assert not [m for m in modules if m.startswith('mla_compile') and m.endswith(('_triton', '_gluon'))]\n"
        "new = {name.split('.')[0] for name in modules}\n"
        "print(sorted(new & {'transformers', 'typer', 'rich', 'triton', 'onnx', 'onnxruntime', 'sympy'}), "
        "torch.ops.mla_compile.decode_attention.default)\n"
        "import transformers\n"
        "print(transformers.DeepseekV3ForCausalLM.__name__)"
    )
    out = _python(code)
    assert out == "[] mla_compile.decode_attention.default\nDeepseekV3ForCausalLM"


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


@full("command")  # doors/test_backend.py finds it in a checkout
def test_backend_is_listed_and_found_by_torch_without_importing_us():
    _distribution()
    code = (
        "import sys, torch\n"
        "print('mla' in torch.compiler.list_backends(), 'mla_compile' in sys.modules)\n"
        "torch.compile(lambda x: x + 1, backend='mla')"
    )
    assert _python(code) == "True False"


# Which rooms a room may import. A room is a folder of mla_compile, passes or kernels, or a module that lies directly in
# mla_compile or kernels. A new arrow is a decision, to be made here; one that nobody uses any more is to be removed.
ROOMS = {
    # What everybody may read.
    "version": "",
    "errors": "",
    "codes": "",
    "options": "core errors",
    "core": "codes errors version",
    # Kernels know no graphs.
    "kernels.call": "",
    "kernels.devices": "",
    "kernels.tuned": "",
    "kernels.reference": "kernels.call",
    "kernels.checks": "errors kernels.call kernels.shared",
    "kernels.alike": "errors kernels.call kernels.launch kernels.reference kernels.triton",
    "kernels.chosen": "kernels.call",
    "kernels.merge": "errors kernels.checks kernels.reference",
    "kernels.tiles": "errors kernels.devices kernels.tuned",
    "kernels.kinds": "kernels.call",
    "kernels.known": "",
    "kernels.shared": "kernels.call kernels.tiles",
    "kernels.plan": "errors kernels.devices kernels.tiles kernels.tuned",
    "kernels.cpu": "core kernels.call kernels.reference",
    "kernels.triton": "errors kernels.call kernels.devices kernels.plan kernels.shared kernels.tiles",
    "kernels.hopper": "kernels.call kernels.devices kernels.kinds kernels.plan kernels.shared kernels.triton",
    "kernels.launch": """errors kernels.call kernels.checks kernels.devices kernels.hopper kernels.kinds
        kernels.known kernels.plan kernels.reference kernels.shared kernels.triton""",
    "kernels.decode": """errors kernels.call kernels.checks kernels.chosen kernels.cpu kernels.known kernels.launch
        kernels.merge kernels.plan kernels.reference kernels.shared""",
    "kernels.index": """kernels.call kernels.checks kernels.cpu kernels.devices kernels.kinds kernels.known
        kernels.launch kernels.plan kernels.reference kernels.triton""",
    "kernels.packed": "errors",
    "kernels.linear": "core errors kernels.cpu kernels.known kernels.packed",
    "kernels.grouped": "errors kernels.cpu kernels.linear",
    "ops": """core kernels.alike kernels.call kernels.checks kernels.decode kernels.grouped kernels.index
        kernels.linear kernels.packed kernels.reference kernels.shared""",
    # Passes know no doors, and no kernels but through their operators.
    "passes.ir": "core",
    "passes.linear": "passes.ir",
    "passes.attention": "passes.ir",
    "passes.quantized": "core errors passes.ir",
    "passes.fused": "passes.attention passes.canonical passes.ir passes.rewrite",
    "passes.dependence": "passes.ir",
    "passes.canonical": "passes.attention passes.dependence passes.ir",
    "passes.cost": "core errors passes.ir",
    "passes.sources": "codes core passes.attention passes.cost passes.dependence passes.ir passes.linear",
    "passes.proof": "core passes.attention passes.dependence passes.ir passes.linear passes.sources",
    "passes.blame": "codes core passes.attention passes.ir passes.linear passes.proof passes.quantized passes.sources",
    "passes.decide": """codes core passes.attention passes.blame passes.cost passes.dependence passes.ir passes.linear
        passes.proof passes.sources""",
    "passes.cache": "core passes.attention passes.ir passes.linear passes.rewrite passes.sources",
    "passes.rewrite": """core ops passes.attention passes.cost passes.decide passes.dependence passes.ir passes.linear
        passes.proof passes.quantized passes.sources""",
    "passes.verify": "core passes.attention passes.decide passes.dependence passes.ir passes.sources",
    "passes.report": "codes core passes.cost passes.decide passes.ir passes.rewrite passes.sources passes.verify",
    # From a model to what runs in its place.
    "report": "codes core errors passes.cost version",
    "pipeline": """codes core errors kernels.cpu kernels.launch kernels.linear options passes.attention passes.blame
        passes.cache passes.canonical passes.cost passes.decide passes.fused passes.ir passes.linear
        passes.quantized passes.report passes.rewrite passes.sources passes.verify report""",
    "capture": "core errors passes.cache passes.ir repeats",
    "runtime": "core errors passes.cache passes.cost passes.ir",
    "repeats": "core",
    "dynamo": """capture codes core errors kernels.cpu options passes.ir passes.quantized pipeline repeats
        report runtime version""",
    "onnx": """capture core errors kernels.call kernels.devices kernels.plan kernels.tiles kernels.triton
        kernels.tuned ops options passes.ir passes.rewrite pipeline report runtime version""",
    # The doors.
    "batching": """api capture core dynamo errors kernels.cpu options passes.cache passes.ir pipeline report
        runtime""",
    "backend": "dynamo options report",
    "registration": "errors passes.quantized",
    "api": "capture core dynamo errors options pipeline report runtime",
    "saved": "api core dynamo errors kernels.cpu options passes.ir runtime version",
    "mla_compile": "api backend batching core errors onnx ops options registration report saved version",
    # The command line uses the package as everybody else does.
    "models": "core errors mla_compile report",
    "serving": "batching core errors version",
    "workbench": "backend core errors mla_compile models passes.cost report runtime",
    "cli": "core errors models onnx report serving version workbench",
    "__main__": "cli version",
}


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    package = Path(mla_compile.__file__).parent
    dotted = {file: ".".join(file.relative_to(package.parent).with_suffix("").parts) for file in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for file, name in dotted.items()}


MODULES = _modules()


def _imports(module: str) -> set[str]:
    """The modules of ours that a module imports: at its top, in a function, for types only, or named in a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{module}, line {node.lineno}: a relative import; arrows are read from absolute ones"
            )
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names |= {node.value} & MODULES.keys()  # what is imported on first use
    return {_owner(name) for name in names if name.split(".")[0] == "mla_compile"} - {module}


def _owner(name: str) -> str:
    """The module that a dotted name lies in."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {module: _imports(module) for module in MODULES}


def _room(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] in (["passes"], ["kernels"]) else 1]) or "mla_compile"


def test_every_room_imports_the_rooms_it_may_and_no_other():
    assert {"mla_compile.ops", "mla_compile.passes.cost.cost", "mla_compile.kernels.reference"} <= MODULES.keys()
    found = {room: set() for room in map(_room, MODULES)}
    for module, targets in arrows().items():
        found[_room(module)] |= {_room(target) for target in targets} - {_room(module)}
    allowed = {room: set(others.split()) for room, others in ROOMS.items()}
    wrong = [f"{room}: a room that ROOMS does not name" for room in sorted(found.keys() - allowed.keys())]
    wrong += [f"{room}: there is no such room" for room in sorted(allowed.keys() - found.keys())]
    for room in sorted(found.keys() & allowed.keys()):
        wrong += [f"{room} imports {other}, a new arrow" for other in sorted(found[room] - allowed[room])]
        wrong += [f"{room} no longer imports {other}" for other in sorted(allowed[room] - found[room])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("of", ["modules", "rooms"])
def test_imports_point_one_way(of):
    rooms = {room: others.split() for room, others in ROOMS.items()}
    try:
        TopologicalSorter(arrows() if of == "modules" else rooms).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_passes_import_little_of_the_package_around_them():
    around = {other for room, others in ROOMS.items() if room.startswith("passes.") for other in others.split()}
    assert {other for other in around if not other.startswith("passes.")} <= {
        "codes",
        "core",
        "errors",
        "ops",
        "options",
    }


def test_passes_are_at_most_ten_levels_deep():
    inside = {m: {t for t in targets if _inside(t)} for m, targets in arrows().items() if _inside(m)}
    levels: dict[str, int] = {}
    for module in TopologicalSorter(inside).static_order():
        levels[module] = 1 + max((levels[target] for target in inside[module]), default=0)
    too_deep = {module: level for module, level in levels.items() if level > 10}
    assert levels
    assert not too_deep


def _inside(module: str) -> bool:
    return module.startswith("mla_compile.passes.")


def test_kernels_know_no_graph_and_passes_know_no_triton():
    forbidden = {"kernels": {"transformers", "torch.fx"}, "passes": {"transformers", "triton"}}
    for module, path in MODULES.items():
        part = module.split(".")[1] if "." in module else ""
        for name in forbidden.get(part, ()):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(t == name or t.startswith(f"{name}.") for t in targets), f"{module} imports {name}"


def test_a_function_of_a_gpu_kernel_has_at_most_150_lines():
    sources = [path for path in MODULES.values() if path.stem.endswith(("_triton", "_gluon"))]
    functions = [n for path in sources for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    assert len(functions) > 50
    assert max(n.end_lineno - n.lineno + 1 for n in functions) <= 150


TWICE = {"Sampling"}  # of a request for continuous batching, and of a run of exported files: both are public


def test_a_type_name_means_one_thing():
    found: dict[str, set[str]] = {}
    for module, path in _modules().items():
        for statement in ast.parse(path.read_text()).body:
            names = [statement.name] if isinstance(statement, ast.ClassDef) else []
            if isinstance(statement, ast.Assign):  # an alias: SomeName = Literal[...]
                names = [
                    t.id for t in statement.targets if isinstance(t, ast.Name) and re.match("_?[A-Z].*[a-z]", t.id)
                ]
            for name in names:
                found.setdefault(name, set()).add(module)
    assert {name: where for name, where in found.items() if len(where) > 1 and name not in TWICE} == {}
