"""The rules of the house, checked on the source itself: layers, nothing executed from files, who may print.

Each rule is a function from source text to complaints, so that it is tested twice: on the package, where
it must stay silent, and on a line that breaks it, where it must speak.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dragoman"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

Rule = Callable[[ast.AST], str | None]


def dotted(node: ast.AST) -> str:
    """`torch.load` for the expression torch.load; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


# ---------------------------------------------------------------- nothing from a file is executed

EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
EXECUTING_CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "__import__": "imports what a text names",
    "os.system": "passes text to a shell",
    "os.popen": "passes text to a shell",
    "torch.load": "unpickles; read safetensors",
    "torch.hub.load": "runs a repository's code",
    "yaml.load": "use yaml.safe_load",
    "yaml.load_all": "use yaml.safe_load_all",
    "yaml.unsafe_load": "use yaml.safe_load",
    "yaml.full_load": "use yaml.safe_load",
}


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return []


def executes_a_file(node: ast.AST) -> str | None:
    for module in imported_modules(node):
        if module.split(".")[0] in EXECUTING_MODULES or module in EXECUTING_CALLS:
            return f"imports {module}"
    if not isinstance(node, ast.Call):
        return None
    name = dotted(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in EXECUTING_CALLS:
        return f"calls {name}: {EXECUTING_CALLS[name]}"
    if name in ("np.load", "numpy.load"):
        allowed = keywords.get("allow_pickle")
        if not (isinstance(allowed, ast.Constant) and allowed.value is False):
            return "calls numpy.load without allow_pickle=False"
    if is_true(keywords.get("shell")):
        return "passes shell=True"
    return None


def trusts_remote_code(node: ast.AST) -> str | None:
    said = "sets trust_remote_code to True"
    if isinstance(node, ast.Call) and any(
        keyword.arg == "trust_remote_code" and is_true(keyword.value) for keyword in node.keywords
    ):
        return said
    if isinstance(node, ast.Dict) and any(
        isinstance(key, ast.Constant) and key.value == "trust_remote_code" and is_true(value)
        for key, value in zip(node.keys, node.values, strict=True)
    ):
        return said
    if isinstance(node, ast.Assign | ast.AnnAssign) and is_true(node.value):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(dotted(target).endswith("trust_remote_code") for target in targets):
            return said
    if isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        with_defaults = [
            *zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True),
            *zip(node.kwonlyargs, node.kw_defaults, strict=True),
        ]
        if any(argument.arg == "trust_remote_code" and is_true(value) for argument, value in with_defaults):
            return said
    return None


# ---------------------------------------------------------------- only cli prints or reads the environment


def prints(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and dotted(node.func) in ("print", "typer.echo", "pprint.pprint"):
        return f"calls {dotted(node.func)}"
    if isinstance(node, ast.Attribute) and dotted(node) in ("sys.stdout", "sys.stderr", "sys.__stdout__"):
        return f"uses {dotted(node)}"
    for module in imported_modules(node):
        if module.split(".")[0] in ("typer", "rich"):
            return f"imports {module}"
    return None


def touches_environment(node: ast.AST) -> str | None:
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv")
    if isinstance(node, ast.Attribute) and dotted(node) in names:
        return f"uses {dotted(node)}"
    for module in imported_modules(node):
        if module in names:
            return f"imports {module}"
    return None


# ---------------------------------------------------------------- the rules on the package


def complaints(rule: Rule, source: str, name: str = "source") -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if (said := rule(node)) is not None:
            yield f"{name}:{getattr(node, 'lineno', '?')} {said}"


def complaints_in_package(rule: Rule, *, except_for: tuple[str, ...] = ()) -> list[str]:
    found: list[str] = []
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(except_for or ("\0",)):
            found += complaints(rule, path.read_text(encoding="utf-8"), name)
    return found


def test_nothing_in_the_package_executes_what_a_file_holds() -> None:
    assert complaints_in_package(executes_a_file) == []


def test_nothing_in_the_package_trusts_remote_code() -> None:
    assert complaints_in_package(trusts_remote_code) == []


def test_only_the_command_line_prints() -> None:
    assert complaints_in_package(prints, except_for=("cli/",)) == []


def test_only_the_command_line_and_runs_touch_the_environment() -> None:
    assert complaints_in_package(touches_environment, except_for=("cli/", "runs.py")) == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (executes_a_file, "import pickle"),
        (executes_a_file, "from joblib import load"),
        (executes_a_file, "from torch import load"),
        (executes_a_file, "torch.load(path, weights_only=True)"),
        (executes_a_file, "yaml.load(text, Loader=yaml.SafeLoader)"),
        (executes_a_file, "eval(text)"),
        (executes_a_file, "np.load(path)"),
        (executes_a_file, "np.load(path, allow_pickle=True)"),
        (executes_a_file, "subprocess.run(command, shell=True)"),
        (trusts_remote_code, "AutoModel.from_pretrained(name, trust_remote_code=True)"),
        (trusts_remote_code, "options = {'trust_remote_code': True}"),
        (trusts_remote_code, "trust_remote_code: bool = True"),
        (trusts_remote_code, "def load(name, *, trust_remote_code=True): ..."),
        (trusts_remote_code, "def load(name, trust_remote_code=True): ..."),
        (prints, "print('done')"),
        (prints, "sys.stderr.write('done')"),
        (prints, "from rich.console import Console"),
        (touches_environment, "os.environ['HOME']"),
        (touches_environment, "os.getenv('HOME')"),
        (touches_environment, "from os import environ"),
    ],
)
def test_each_rule_speaks_on_a_line_that_breaks_it(rule: Rule, line: str) -> None:
    assert list(complaints(rule, line))


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (executes_a_file, "model.eval()"),
        (executes_a_file, "yaml.safe_load(text)"),
        (executes_a_file, "np.load(path, allow_pickle=False)"),
        (executes_a_file, "load_file(path)"),
        (trusts_remote_code, "load(name, trust_remote_code=trust_remote_code)"),
        (trusts_remote_code, "def load(name, *, trust_remote_code=False): ..."),
        (prints, "blueprint('done')"),
        (touches_environment, "os.replace(a, b)"),
    ],
)
def test_each_rule_is_silent_on_a_line_that_keeps_it(rule: Rule, line: str) -> None:
    assert not list(complaints(rule, line))


# ---------------------------------------------------------------- layers and names


def test_imports_go_down_the_house_only() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_room_has_a_place_in_the_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    placed = set(re.findall(r"dragoman\.(\w+)", " ".join(contract["layers"])))
    rooms = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    # zoo holds trained pairs, data without code; the other two are the package itself.
    assert rooms - placed <= {"__init__", "__main__", "zoo"}


def test_help_answers_without_importing_torch() -> None:
    code = "import sys, dragoman.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_a_sidecar_does_not_import_torch() -> None:
    code = "import sys, dragoman.sidecar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_is_called_av_because_it_would_shadow_pyav() -> None:
    named = [
        path
        for path in repository_files()
        if path.name == "av.py" or path.parts[-2:] == ("av", "__init__.py")
    ]
    assert named == []


def test_legacy_spellings_live_in_the_sidecar_alone() -> None:
    legacy = re.compile(r"\b(actor|critic)s?\b", re.IGNORECASE)
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if legacy.search(path.read_text(encoding="utf-8"))
    }
    assert {user for user in users if not user.startswith("sidecar/")} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_each_module_says_what_it_is_for_and_postpones_annotations(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no module docstring"
    has_code = len(tree.body) > 1
    postponed = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert postponed or not has_code


def test_no_source_file_is_longer_than_400_lines() -> None:
    sources = [path for path in repository_files() if path.suffix in (".py", ".sh")]
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


# ---------------------------------------------------------------- nothing of one machine


def repository_files() -> list[Path]:
    """Files that are or will be committed, relative to the root; in an unpacked archive, all of them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        skipped = {".venv", ".git", "__pycache__", ".ruff_cache", ".pytest_cache"}
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*") if not skipped & set(path.parts)]
    return [path for path in paths if (ROOT / path).is_file()]


# Assembled here, so that this file does not hold what it forbids.
HOSTS = [
    ".".join(parts)
    for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"))
]
HOSTS += [".".join(parts) for parts in (("deb", "debian", "org"), ("download", "pytorch", "org"))]
FOREIGN = re.compile(
    "|".join([*(re.escape(host) for host in HOSTS), r"(?<![\w.$)}\]])/(?:work|root|opt|home|Users)/[\w.]+"])
)


def readable_part(path: Path) -> str:
    """The text of a file; of a binary one its start, where safetensors keeps its header."""
    data = path.read_bytes()
    return (data[: 2**16] if b"\0" in data[: 2**13] else data).decode("utf-8", errors="replace")


def test_the_repository_names_no_registry_host_and_no_path_of_one_machine() -> None:
    found = {
        str(path): match.group()
        for path in repository_files()
        if (match := FOREIGN.search(readable_part(ROOT / path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text", ["see https://" + HOSTS[0] + "/x", '"' + "/" + 'home/ada/model"', " /" + "root/.cache"]
)
def test_a_host_or_a_machine_path_would_be_noticed(text: str) -> None:
    assert FOREIGN.search(text)


@pytest.mark.parametrize("text", ["../work/later", "$HOME/" + "work/x", "an option, either/or/opt"])
def test_relative_paths_are_not_taken_for_machine_paths(text: str) -> None:
    assert not FOREIGN.search(text)
