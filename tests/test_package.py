"""The package as a user meets it: its names, its version, its entry points, and which way its imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
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


# Imports point one way. For each room, the rooms that it imports: a new arrow fails, and so does one that nobody needs
# any more. A door is a room of one module; of kernels/, what chooses a kernel is a room above those that hold them.
ARROWS = {
    "__init__": "api core errors onnx options report version",
    "__main__": "cli",
    "analysis": "core passes.attention passes.canonical passes.decide passes.ir passes.linear",
    "api": "capture core dynamo errors options pipeline report runtime",
    "backend": "dynamo options report",
    "caching": "analysis core passes.cache passes.decide",
    "capture": "core errors passes.cache passes.ir",
    "cli": "core errors models onnx report version workbench",
    "codes": "",
    "core": "codes errors version",
    "dynamo": "capture codes core errors kernels.cpu options pipeline report runtime",
    "errors": "",
    "kernels": "errors kernels.cpu kernels.hopper kernels.plans kernels.triton",
    "kernels.cpu": "kernels.plans",
    "kernels.hopper": "kernels.plans kernels.triton",
    "kernels.plans": "errors",
    "kernels.triton": "errors kernels.plans",
    "models": "__init__ core errors report",
    "onnx": "capture core errors kernels.plans kernels.triton ops options passes.ir pipeline report runtime version",
    "ops": "kernels kernels.plans",
    "options": "errors",
    "passes.attention": "passes.ir",
    "passes.cache": "core passes.attention passes.decide passes.ir passes.linear",
    "passes.canonical": "passes.attention passes.ir",
    "passes.decide": "codes core errors passes.attention passes.dependence passes.ir passes.linear",
    "passes.dependence": "passes.ir",
    "passes.ir": "core",
    "passes.linear": "passes.ir",
    "passes.report": "codes core passes.decide passes.ir passes.linear passes.rewrite passes.verify",
    "passes.rewrite": "core ops passes.attention passes.decide passes.dependence passes.ir passes.linear",
    "passes.verify": "passes.decide passes.ir passes.rewrite",
    "pipeline": "analysis caching codes core errors options passes.attention passes.decide passes.ir passes.linear "
    "passes.report passes.rewrite passes.verify report",
    "report": "codes core errors passes.decide version",
    "runtime": "core errors passes.cache passes.decide passes.ir pipeline",
    "version": "",
    "workbench": "__init__ backend core errors models passes.decide report",
}
DEEPEST = 8  # modules of passes/ one above the other: more, and nobody holds the way from a rule to a verdict in mind
CHOOSING = ("decode", "launch")


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it, wherever its file lies."""
    package = Path(mla_compile.__file__).parent
    homes = {name: (package / name).resolve() for name in ("passes", "kernels")}
    found = {p.relative_to(package): p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in homes}
    found |= {Path(name, p.relative_to(home)): p for name, home in homes.items() for p in home.rglob("*.py")}
    return {".".join(p.with_suffix("").parts).removesuffix(".__init__"): path for p, path in found.items()}


def _imports(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of ours that a file imports: at its top, inside a function, or for types alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; the rooms are read from absolute ones"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {_owner(name, modules) for name in names if name.split(".")[0] == "mla_compile"}


def _owner(name: str, modules: Collection[str]) -> str:
    """The module a dotted name lies in; a name of the package itself belongs to ``__init__``."""
    own = name.removeprefix("mla_compile").removeprefix(".")
    while own and own not in modules:
        own = own.rpartition(".")[0]
    return own or "__init__"


def _room(module: str) -> str:
    first, *rest = module.split(".")
    if first == "passes":
        return ".".join((first, *rest[:1]))
    if first == "kernels" and rest:
        leaf = (rest[0],) if len(rest) > 1 else () if rest[0] in CHOOSING else ("plans",)
        return ".".join((first, *leaf))
    return first


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {module: _imports(path, modules) - {module} for module, path in modules.items()}


def _levels(graph: Mapping[str, Collection[str]]) -> dict[str, int]:
    """How many nodes stand one above the other below each; a cycle is an error."""
    levels: dict[str, int] = {}

    def level(node: str, below: tuple[str, ...]) -> int:
        assert node not in below, f"a cycle: {' -> '.join((*below[below.index(node) :], node))}"
        if node not in levels:
            levels[node] = 1 + max((level(n, (*below, node)) for n in graph[node] if n in graph), default=0)
        return levels[node]

    for node in graph:
        level(node, ())
    return levels


def test_arrows_between_rooms():
    arrows: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        own = arrows.setdefault(_room(module), set())
        own |= {_room(m) for m in imported} - {_room(module)}
    arrows = {room: own for room, own in arrows.items() if own or room in ARROWS}
    assert arrows == {room: set(own.split()) for room, own in ARROWS.items()}
    _levels(arrows)


def test_no_module_imports_itself_by_way_of_others():
    _levels(_graph())


def test_passes_are_few_levels_deep():
    levels = _levels({m: imported for m, imported in _graph().items() if m.startswith("passes.")})
    assert max(levels.values()) <= DEEPEST, sorted(m for m, level in levels.items() if level > DEEPEST)


def test_static_tools_find_the_links():
    """What reads files and runs nothing (an editor, a type checker, a code browser) finds both in a plain checkout."""
    if not (ROOT / "passes").is_dir():
        pytest.skip("the wheel has folders in place of the links")
    for name in ("passes", "kernels"):
        link = ROOT / "mla_compile" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name


def test_kernels_know_no_graph_and_passes_know_no_triton():
    forbidden = {"kernels": {"transformers", "torch.fx"}, "passes": {"transformers", "triton"}}
    for module, path in _modules().items():
        for name in forbidden.get(module.split(".")[0], ()):
            for node in ast.walk(ast.parse(path.read_text())):
                targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(t == name or t.startswith(f"{name}.") for t in targets), f"{module} imports {name}"
